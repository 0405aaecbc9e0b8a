"""One step is prepared while another runs."""

from __future__ import annotations

import pytest

from minisgl.core import Batch
from minisgl.message.types import FinishReason
from minisgl.plugin.records import StepRecord
from minisgl.scheduler.scheduler import Scheduler
from minisgl.testing.fake_engine import FakeEngine, make_limits
from tests.core.scheduler.harness import Harness, make_cache, make_config, make_policy

PROMPT = [2, 7, 1, 8, 2, 8]


@pytest.mark.parametrize(("is_overlap", "num_before"), [(True, 2), (False, 1)])
def test_the_next_step_is_launched_before_the_result_is_awaited(
    is_overlap: bool, num_before: int
) -> None:
    harness = Harness(config=make_config(is_overlap=is_overlap))
    harness.submit(PROMPT, max_tokens=5, ignore_eos=True)
    while not harness.outcomes[0].tokens:
        harness.step()
    assert harness.engine.num_steps == num_before


def test_the_token_after_a_stop_is_dropped() -> None:
    eos = frozenset(range(0, 97, 2))
    results: list[tuple[list[int], FinishReason, int]] = []
    for is_overlap in (True, False):
        harness = Harness(make_limits(eos_token_ids=eos), make_config(is_overlap=is_overlap))
        harness.submit(PROMPT, max_tokens=50)
        harness.run()
        harness.check_all()
        num_discarded = harness.scheduler.stats().num_discarded_tokens
        results.append((harness.outcomes[0].tokens, harness.outcomes[0].end.reason, num_discarded))
    assert results[0][:2] == results[1][:2]
    assert [num_discarded for _, _, num_discarded in results] == [1, 0]


def test_no_step_is_launched_for_a_request_that_ends_by_length() -> None:
    harness = Harness()
    harness.submit(PROMPT, max_tokens=5, ignore_eos=True)
    harness.run()
    assert harness.engine.num_steps == 5  # one prefill, four decodes
    assert harness.scheduler.stats().num_discarded_tokens == 0


def test_a_request_joins_while_others_decode() -> None:
    harness = Harness()
    sizes: list[int] = []

    def note(batch: Batch) -> None:
        if batch.is_decode:
            sizes.append(batch.size)

    harness.engine.on_launch = note
    harness.submit(PROMPT, max_tokens=10, ignore_eos=True)
    for _ in range(4):
        harness.step()
    harness.submit([1, *PROMPT], max_tokens=3, ignore_eos=True)
    harness.run()
    harness.check_all()
    assert sizes == [1, 1, 1, 2, 2, 1, 1, 1, 1]


def test_pages_of_a_finished_request_stay_until_its_last_step_has_run() -> None:
    eos = frozenset(range(97))
    harness = Harness(make_limits(eos_token_ids=eos, num_pages=4), make_config(), "naive")
    harness.submit(PROMPT, max_tokens=9)
    harness.step()  # launches the prefill
    harness.step()  # launches a decode, then sees the end
    assert harness.outcomes[0].end.reason == "stop"
    assert harness.scheduler.stats().num_free_pages == 2
    harness.step()
    assert harness.scheduler.stats().num_free_pages == 4


def test_an_observer_is_told_about_each_step() -> None:
    records: list[StepRecord] = []
    harness = Harness()
    harness.scheduler = Scheduler(
        harness.engine,
        make_cache("radix", 4),
        make_policy("fcfs"),
        harness.io,
        make_config(),
        on_step=records.append,
    )
    for prompt in ([1] * 9, [1] * 10):
        harness.submit(prompt, max_tokens=2, ignore_eos=True)
        harness.run()
    assert [(r.phase, r.batch_size, r.num_tokens, r.num_cached_tokens) for r in records] == [
        ("prefill", 1, 9, 0),
        ("decode", 1, 1, 0),
        ("prefill", 1, 2, 8),
        ("decode", 1, 1, 0),
    ]
    assert all(0 < record.duration_s < 60 for record in records)


def test_the_fake_engine_runs_no_step_before_it_must() -> None:
    engine = FakeEngine(make_limits())
    harness = Harness()
    harness.engine = engine
    harness.scheduler = Scheduler(
        engine, make_cache("radix", 4), make_policy("fcfs"), harness.io, make_config()
    )
    harness.submit(PROMPT, max_tokens=3)
    harness.step()
    assert engine.num_steps == 1
    assert harness.outcomes[0].tokens == []
