"""Something breaks: who has to suffer, and who has not."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from minisgl.core import Batch
from minisgl.engine.contract import ForwardOutput, StepResult
from minisgl.errors import IntegrityError, ProcessorError, SettingsError
from minisgl.message.types import UserMsg
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.config import SchedulerConfig
from minisgl.testing.fake_engine import FakeEngine, FakeStep, make_limits
from tests.core.scheduler.harness import Harness, Outcome, make_config


def prompt_of(seed: int) -> list[int]:
    return [(seed * 31 + i * i) % 97 for i in range(14)]


def make_harness(**fields: object) -> Harness:
    return Harness(make_limits(num_pages=100), make_config(is_isolating=True, **fields))


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Keep the tracebacks of the faults that these tests make out of the log."""
    caplog.set_level(logging.CRITICAL, "minisgl.scheduler")


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("is_overlap", [True, False])
def test_a_step_that_one_request_breaks_fails_that_request_alone(
    phase: str, is_overlap: bool
) -> None:
    harness = make_harness(is_overlap=is_overlap, max_prefill_length=40)

    def refuse(batch: Batch) -> None:
        if batch.phase == phase and any(req.uid == 2 for req in batch.reqs):
            raise RuntimeError("cannot do 2")

    harness.engine.on_launch = refuse
    for uid in range(6):
        harness.submit(prompt_of(uid), max_tokens=12)
    harness.run()
    end = harness.outcomes[2].end
    assert (end.reason, end.detail) == ("error", "internal error: RuntimeError: cannot do 2")
    assert end.num_output_tokens == (phase == "decode")
    for uid in (0, 1, 3, 4, 5):
        harness.check(uid)
    stats = harness.scheduler.stats()
    assert stats.num_free_pages + stats.num_evictable_pages == stats.num_pages


@pytest.mark.parametrize("nth", range(1, 8))
def test_a_launch_that_fails_once_changes_nothing(nth: int) -> None:
    harness = make_harness(max_prefill_length=30)
    countdown = [nth]

    def hiccup(batch: Batch) -> None:
        countdown[0] -= 1
        if countdown[0] == 0 and batch.size:
            raise RuntimeError("hiccup")

    harness.engine.on_launch = hiccup
    for uid in range(4):
        harness.submit(prompt_of(uid % 2), max_tokens=9)
    harness.run()
    harness.check_all()
    assert {outcome.end.reason for outcome in harness.outcomes.values()} == {"length"}


def test_a_message_that_cannot_be_read_fails_alone() -> None:
    harness = make_harness()
    harness.submit(prompt_of(0), max_tokens=3)
    ragged = [[1, 2], [3]]
    harness.outcomes[1] = Outcome()
    harness.io.put([UserMsg(1, ragged, SamplingParams())])  # type: ignore[arg-type]  # on purpose
    harness.run()
    harness.check(0)
    assert harness.outcomes[1].end.detail.startswith("internal error: ValueError")


class BrokenOutput(ForwardOutput):
    """A step that fails on its way."""

    def wait(self) -> StepResult:
        raise RuntimeError("lost on the way")


class LossyEngine(FakeEngine):
    """Loses the steps of the given numbers."""

    lost: frozenset[int] = frozenset()

    def forward_batch(self, batch: Batch) -> ForwardOutput:
        output = super().forward_batch(batch)
        assert isinstance(output, FakeStep)
        if self.num_steps in self.lost:
            self._launched.pop()
            return BrokenOutput()
        return output


def make_lossy(lost: set[int], **fields: object) -> Harness:
    harness = make_harness(**fields)
    harness.engine.__class__ = LossyEngine
    assert isinstance(harness.engine, LossyEngine)
    harness.engine.lost = frozenset(lost)
    return harness


@pytest.mark.parametrize("is_overlap", [True, False])
@pytest.mark.parametrize("lost", range(1, 8))
def test_a_step_lost_on_its_way_fails_who_runs_and_spares_who_waits(
    lost: int, is_overlap: bool
) -> None:
    harness = make_lossy({lost}, is_overlap=is_overlap, max_prefill_length=30)
    for uid in range(20):
        harness.submit(prompt_of(uid % 5), max_tokens=6)
    harness.run()
    ends = {uid: outcome.end for uid, outcome in harness.outcomes.items()}
    failed = [uid for uid, end in ends.items() if end.reason == "error"]
    assert 1 <= len(failed) <= 8  # rows
    assert all("lost on the way" in ends[uid].detail for uid in failed)
    for uid in set(range(20)) - set(failed):
        harness.check(uid)


def test_an_engine_that_always_fails_is_given_up() -> None:
    harness = make_lossy(set(range(1, 100)))
    for uid in range(50):
        harness.submit(prompt_of(uid), max_tokens=6)
    with pytest.raises(RuntimeError, match="lost on the way"):
        harness.scheduler.run_forever()
    harness.collect()
    assert all(outcome.end.reason in ("error", "abort") for outcome in harness.outcomes.values())


def test_a_logits_processor_that_always_fails_ends_no_more_than_its_requests() -> None:
    harness = make_harness()

    def refuse(batch: Batch) -> None:
        if any(req.uid < 9 for req in batch.reqs):
            raise ProcessorError("hook plugin 'x' of acme 1.0: its logits processor failed")

    harness.engine.on_launch = refuse
    for uid in range(10):
        harness.submit(prompt_of(uid), max_tokens=3)
        harness.run()
    assert all("'x' of acme 1.0" in harness.outcomes[uid].end.detail for uid in range(9))
    harness.check(9)


def test_where_ranks_must_agree_a_failure_is_raised() -> None:
    harness = Harness(config=make_config(is_isolating=False))

    def refuse(batch: Batch) -> None:
        raise RuntimeError(f"no {batch.phase}")

    harness.engine.on_launch = refuse
    harness.submit(prompt_of(1), max_tokens=6)
    with pytest.raises(RuntimeError, match="no prefill"):
        harness.step()


def test_the_integrity_check_notices_a_lost_page() -> None:
    harness = Harness()
    harness.submit(prompt_of(1), max_tokens=2)
    harness.run()
    harness.cache.evict(1)  # and forget to free it
    with pytest.raises(IntegrityError, match="has 0 owners, not 1"):
        harness.scheduler.check_integrity()


def test_a_scheduler_checks_its_books_when_its_last_results_are_out() -> None:
    harness = Harness(config=SchedulerConfig())
    limits = harness.engine.limits
    page = np.array([limits.num_pages - 1], dtype=np.int32)  # which is free as well
    harness.cache.insert_prefix(np.zeros(limits.page_size, dtype=np.int32), page)
    uid = harness.submit(prompt_of(1), max_tokens=2)
    harness.step()
    assert harness.scheduler.has_work
    with pytest.raises(IntegrityError, match="has 2 owners, not 1"):
        step_until_idle(harness)
    harness.collect()
    harness.check(uid)


def test_a_scheduler_checks_its_books_after_all_requests_were_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Harness(config=SchedulerConfig())
    harness.submit(prompt_of(1), max_tokens=9)
    harness.step()
    harness.scheduler.abort_all("a test wants it")
    checks: list[bool] = []
    monkeypatch.setattr(harness.scheduler, "check_integrity", lambda: checks.append(True))
    harness.scheduler.step()
    harness.scheduler.step()
    assert checks == [True]


def step_until_idle(harness: Harness) -> None:
    while harness.scheduler.has_work:
        harness.scheduler.step()


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("max_prefill_length", 0, "must be at least 1"),
        ("max_prefill_steps", 0, "must be at least 1"),
        ("max_queued_requests", 0, "must be at least 1, or none"),
        ("headroom_tokens", -1, "must be at least 0"),
        ("admission", "bold", "must be optimistic or reserve"),
    ],
)
def test_a_wrong_setting_is_named(field: str, value: object, allowed: str) -> None:
    with pytest.raises(SettingsError, match=f"{field} .*: {allowed}"):
        make_config(**{field: value})
