"""The suite of collectives catches broken communicators."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.distributed.contract import Communicator
from minisgl.testing.conformance import test_comm
from tests.contract import broken_comms as broken
from tests.contract.suite_runs import path_of, run_suite, run_suites

FAULTS: list[tuple[type[Communicator], str]] = [
    (broken.KeepsItsPart, "all_reduce returns the sum over ranks"),
    (broken.GathersBackwards, "in rank order"),
    (broken.ReturnsAView, "all_gather returns a contiguous tensor"),
    (broken.TakesTheLargest, "min_int returns the smallest value"),
    (broken.CutsLongMessages, "broadcast_bytes sends a long payload"),
    (broken.CountsFromOne, "rank and size are those of the config"),
    (broken.FusesWithoutTheResidual, "the norm of the ranks' sum and the residual"),
]

# The call that is in progress when a rank dies, and what the suite says of it.
LOSSES: list[tuple[type[Communicator], str, str]] = [
    (broken.CarriesOnAlone, "in_a_sum", "it returned as if nothing had happened"),
    (broken.SaysItInOtherWords, "in_a_sum", "it raised another error"),
    (broken.WaitsForTheDead, "waiting_for_a_message", "it had not ended"),
]


def name_of(comm: type[Communicator]) -> str:
    return f"comm:{path_of(comm)}"


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What the suite says about each communicator."""
    comms = [fault for fault, _ in FAULTS]
    return run_suites(tmp_path_factory.mktemp("comms"), map(name_of, comms), "-k", "ranks_agree")


@pytest.mark.parametrize(
    ("comm", "sentence"), FAULTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_the_suite_names_the_rule_that_a_broken_communicator_breaks(
    failures: dict[str, list[str]], comm: type[Communicator], sentence: str
) -> None:
    found = failures[name_of(comm)]
    assert any(sentence in failure for failure in found), found


@pytest.mark.parametrize(
    ("comm", "part", "sentence"), LOSSES, ids=[loss[0].__name__ for loss in LOSSES]
)
def test_the_suite_finds_a_communicator_that_hides_a_dead_rank(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    comm: type[Communicator],
    part: str,
    sentence: str,
) -> None:
    monkeypatch.setattr(test_comm, "NOTICE_S", 5.0)  # one of them does wait for ever
    failures = run_suite(tmp_path, name_of(comm), "-k", part)
    assert failures
    assert "CommError when another rank is gone" in failures[0]
    assert sentence in failures[0]
