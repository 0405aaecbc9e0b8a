"""A trace that is replayed on the same parts makes the same decisions, and on others says where."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from minisgl.core import Batch
from minisgl.engine.contract import ForwardOutput
from minisgl.scheduler.trace import Arrival, Decision, Ending
from minisgl.testing.fake_engine import FakeEngine, FakeModel
from tests.core.replay.replay_loads import Setup, record, replayed

SETUP = Setup()
SETUPS = {
    "as it comes": SETUP,
    "no overlap": replace(SETUP, config=replace(SETUP.config, is_overlap=False)),
    "reserving": replace(SETUP, config=replace(SETUP.config, admission="reserve")),
    "short queue": replace(SETUP, config=replace(SETUP.config, max_queued_requests=2)),
    "lpm": replace(SETUP, policy="lpm"),
    "priority": replace(SETUP, policy="priority"),
    "naive": replace(SETUP, cache="naive"),
    "pages of one token": SETUP.with_page_size(1),
    "large pages": SETUP.with_page_size(8),
}


@pytest.mark.parametrize("has_prompts", [False, True], ids=["structure", "prompts"])
@pytest.mark.parametrize("name", SETUPS)
def test_the_same_parts_decide_the_same(tmp_path: Path, name: str, has_prompts: bool) -> None:
    setup = SETUPS[name]
    for seed in range(4):
        trace = record(setup, tmp_path / f"{seed}.jsonl", seed, has_prompts=has_prompts)
        report = replayed(trace, setup)
        assert report.first is None, report.first
        assert report.recorded == report.replayed


def test_the_loads_have_everything_in_them(tmp_path: Path) -> None:
    traces = [record(SETUP, tmp_path / f"{seed}.jsonl", seed) for seed in range(4)]
    totals = [replayed(trace, SETUP).recorded for trace in traces]
    assert sum(each.num_retractions for each in totals) > 0
    assert sum(each.num_cached_tokens for each in totals) > 0
    reasons = {reason for each in totals for reason in each.finished}
    assert reasons == {"stop", "length", "abort", "error"}
    parts = [p for t in traces for e in t.events if isinstance(e, Decision) for p in e.parts]
    assert not all(part.is_sampled for part in parts), "no prompt came in chunks"


def test_a_model_that_gives_the_recorded_tokens_does_not_differ(tmp_path: Path) -> None:
    trace = record(SETUP, tmp_path / "trace.jsonl", has_prompts=True)
    report = replayed(trace, SETUP, FakeEngine(SETUP.limits))
    assert report.has_tokens
    assert report.first is None, report.first


class OtherModel(FakeModel):
    """Chooses another token after some histories."""

    def next_token(self, second: np.ndarray) -> int:
        token = super().next_token(second)
        return (token + 1) % 97 if len(second) == 20 else token


def test_the_first_token_that_differs_is_named(tmp_path: Path) -> None:
    trace = record(SETUP, tmp_path / "trace.jsonl", has_prompts=True)
    engine = FakeEngine(SETUP.limits)
    engine.model = OtherModel(SETUP.limits.max_seq_len, SETUP.limits.vocab_size)
    report = replayed(trace, SETUP, engine)
    assert report.first is not None
    assert report.first.kind == "token"
    first = report.differing_tokens[0]
    assert f"request {first.uid}: token {first.index} of the output" in report.first.text
    arrivals = {e.uid: e for e in trace.events if isinstance(e, Arrival)}
    assert arrivals[first.uid].prompt_len + first.index == 20
    # Decisions are those of the recording all the same.
    assert report.num_different_steps == 0


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (replace(SETUP, cache="naive"), "tokens before the step"),
        (SETUP.with_page_size(8), "step"),
        (replace(SETUP, config=replace(SETUP.config, max_prefill_length=20)), "step"),
        (replace(SETUP, config=replace(SETUP.config, admission="reserve")), "other requests"),
    ],
    ids=["cache", "page size", "chunks", "admission"],
)
def test_other_parts_are_found_out(tmp_path: Path, other: Setup, text: str) -> None:
    trace = record(SETUP, tmp_path / "trace.jsonl")
    report = replayed(trace, other)
    assert report.first is not None
    assert report.first.kind == "step"
    assert text in report.first.text
    assert report.num_different_steps > 0
    steps = [event for event in trace.events if isinstance(event, Decision)]
    number = int(report.first.text.split()[1].rstrip(":"))
    assert report.first.tick <= steps[number - 1].tick


def test_an_engine_that_fails_is_found_out(tmp_path: Path) -> None:
    trace = record(SETUP, tmp_path / "trace.jsonl")

    class Failing(FakeEngine):
        def forward_batch(self, batch: Batch) -> ForwardOutput:
            if self.num_steps == 5:
                self.num_steps += 1
                raise RuntimeError("out of luck")
            return super().forward_batch(batch)

    report = replayed(trace, SETUP, Failing(SETUP.limits))
    assert report.first is not None
    assert "out of luck here" in report.first.text


def test_a_recording_that_was_cut_off_is_replayed_as_far_as_it_goes(tmp_path: Path) -> None:
    trace = record(SETUP, tmp_path / "trace.jsonl", end="cut")
    open_reqs = {e.uid for e in trace.events if isinstance(e, Arrival)}
    open_reqs -= {e.uid for e in trace.events if isinstance(e, Ending)}
    assert open_reqs, "nothing was open when it was cut"
    report = replayed(trace, SETUP)
    assert not report.is_complete
    assert report.first is None, report.first


def test_requests_that_a_shutdown_ended_end_so_again(tmp_path: Path) -> None:
    trace = record(SETUP, tmp_path / "trace.jsonl", end="shutdown")
    endings = [event for event in trace.events if isinstance(event, Ending)]
    assert endings[-1].detail == "the engine is shutting down"
    report = replayed(trace, SETUP)
    assert report.is_complete
    assert report.first is None, report.first
    assert report.replayed.finished == report.recorded.finished
