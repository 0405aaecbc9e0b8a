"""Schemathesis: what /openapi.json says, asked and answered at random."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

from tests.server.server_process import ServerProcess

schemathesis: Any = pytest.importorskip("schemathesis", reason="needs the group 'clients'")
checks: Any = pytest.importorskip("schemathesis.specs.openapi.checks")

NUM_EXAMPLES = 10


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_every_route_keeps_what_its_description_promises(server: ServerProcess, mode: str) -> None:
    api = schemathesis.openapi.from_url(f"{server.url}/openapi.json", timeout=60)
    operations = [result.ok() for result in api.get_all_operations()]
    assert len(operations) >= 12
    for operation in operations:
        check(operation, schemathesis.GenerationMode(mode))


def check(operation: Any, mode: Any) -> None:  # of a library that may be missing
    """Send random requests, and compare each answer with the description."""
    # A body can fit its schema and still ask for what cannot be: a token that the model does not
    # have, or more tokens at least than at most. That is a 400, so acceptance is not checked.
    excluded = [checks.positive_data_acceptance]

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def run(case: Any) -> None:  # as above
        case.call_and_validate(excluded_checks=excluded, timeout=120)

    try:
        run()
    except Unsatisfiable:
        assert mode.value == "negative"  # a route without input can be asked in one way alone


def test_the_server_still_answers(http: httpx.Client) -> None:
    assert http.get("/health").status_code == 200
    answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
    assert answer.status_code == 200
