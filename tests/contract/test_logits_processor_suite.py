"""The suite of logits processors catches broken ones and passes those that are right."""

from __future__ import annotations

import pytest

from tests.contract import broken_processors as broken
from tests.contract.suite_runs import run_suites

FAULTS = {
    "returns_new_logits": "changes logits in place and returns nothing",
    "returns_one_processor": "the hook returns a sequence of processors",
    "changes_the_first_row_only": "that row and its request alone",
    "centres_the_batch": "that row and its request alone",
    "adds_noise": "a processor is repeatable",
    "counts_its_calls": "a processor is repeatable",
    "divides_by_zero": "leaves no NaN",
    "forbids_everything": "leaves at least one token to each row",
    "allows_what_was_forbidden": "a logit of -inf stays",
    "appends_a_token": "does not change requests",
    "needs_an_output": "IndexError",
    "knows_one_vocabulary": "The size of tensor",
    "remembers_uids": "a later one of the same uid",
    "needs_gradients": "RuntimeError",
}


RIGHT = ("forbids_repetition", "takes_no_argument")


def name_of(hook: str) -> str:
    return f"logits_processor:{broken.__name__}:{hook}"


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What the suite says about each hook."""
    folder = tmp_path_factory.mktemp("logits_processors")
    return run_suites(folder, map(name_of, (*FAULTS, *RIGHT)))


@pytest.mark.parametrize("hook", FAULTS)
def test_the_suite_names_the_rule_that_a_broken_processor_breaks(
    failures: dict[str, list[str]], hook: str
) -> None:
    found = failures[name_of(hook)]
    assert any(FAULTS[hook] in failure for failure in found), found


@pytest.mark.parametrize("hook", RIGHT)
def test_the_suite_passes_processors_that_are_right(
    failures: dict[str, list[str]], hook: str
) -> None:
    assert failures[name_of(hook)] == []
