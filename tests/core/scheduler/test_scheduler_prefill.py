"""Chunks, budgets, and who may start before whom."""

from __future__ import annotations

import pytest

from minisgl.core import Batch
from minisgl.testing.fake_engine import make_limits
from tests.core.scheduler.harness import Harness, make_config


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    return [(7 * i + 13 * seed + i * i * (seed + 3)) % 97 for i in range(num_tokens)]


def watch(harness: Harness) -> list[tuple[str, int, list[int]]]:
    """Record phase, tokens and uids of each batch."""
    batches: list[tuple[str, int, list[int]]] = []

    def note(batch: Batch) -> None:
        num_tokens = sum(req.extend_len for req in batch.reqs)
        batches.append((batch.phase, num_tokens, [req.uid for req in batch.reqs]))

    harness.engine.on_launch = note
    return batches


@pytest.mark.parametrize("chunk", [1, 2, 5, 16, 31, 100])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_prompt_in_chunks_samples_once_and_right(chunk: int, page_size: int) -> None:
    limits = make_limits(num_pages=200 // page_size, page_size=page_size)
    harness = Harness(limits, make_config(max_prefill_length=chunk))
    batches = watch(harness)
    harness.submit(prompt_of(31), max_tokens=5)
    harness.run()
    harness.check_all()
    prefills = [num_tokens for phase, num_tokens, _ in batches if phase == "prefill"]
    assert prefills == [chunk] * (31 // chunk) + [31 % chunk] * (31 % chunk > 0)


def test_no_prefill_step_exceeds_its_budget() -> None:
    harness = Harness(make_limits(num_pages=600), make_config(max_prefill_length=50))
    batches = watch(harness)
    for seed in range(40):
        harness.submit(prompt_of(1 + 5 * seed % 90, seed), max_tokens=2)
    harness.run()
    harness.check_all()
    prefills = [num_tokens for phase, num_tokens, _ in batches if phase == "prefill"]
    assert max(prefills) == 50


@pytest.mark.parametrize("max_prefill_steps", [1, 3])
def test_a_decode_waits_for_so_many_prefill_steps_at_most(max_prefill_steps: int) -> None:
    limits = make_limits(num_pages=400, max_running_reqs=16)
    config = make_config(max_prefill_length=8, max_prefill_steps=max_prefill_steps)
    harness = Harness(limits, config)
    stream = harness.submit([1, 2, 3], max_tokens=60, ignore_eos=True)
    harness.step()
    for seed in range(100):
        harness.submit(prompt_of(60, seed), max_tokens=2)
        harness.step()
    steps = harness.outcomes[stream].token_steps
    gaps = [after - before for before, after in zip(steps[1:], steps[2:], strict=False)]
    assert len(gaps) > 15
    assert max(gaps) == max_prefill_steps + 1


def test_prefills_go_on_beside_a_full_batch_of_decodes() -> None:
    harness = Harness(make_limits(num_pages=400, max_running_reqs=8), make_config())
    for seed in range(7):
        harness.submit(prompt_of(4, seed), max_tokens=100, ignore_eos=True)
    harness.step()
    late = harness.submit(prompt_of(30, 9), max_tokens=1)
    for _ in range(3):
        harness.step()
    assert harness.outcomes[late].end.reason == "length"


def test_a_short_prompt_need_not_wait_for_a_giant_to_be_done() -> None:
    limits = make_limits(num_pages=400, max_seq_len=1000)
    harness = Harness(limits, make_config(max_prefill_length=40))
    giant = harness.submit(prompt_of(900), max_tokens=1)
    harness.step()
    short = harness.submit(prompt_of(8, 5), max_tokens=1)
    harness.run()
    harness.check_all()
    assert harness.outcomes[short].token_steps[0] <= 3
    assert harness.outcomes[giant].token_steps[0] >= 22


def test_a_second_giant_waits_until_the_first_is_computed() -> None:
    limits = make_limits(num_pages=400, max_seq_len=400)
    harness = Harness(limits, make_config(max_prefill_length=40, max_prefill_steps=100))
    batches = watch(harness)
    harness.submit(prompt_of(300, 1), max_tokens=1)
    harness.submit(prompt_of(300, 2), max_tokens=1)
    harness.run()
    harness.check_all()
    assert [uids for _, _, uids in batches[:7]] == [[0]] * 7
    assert {num_tokens for _, num_tokens, _ in batches[:15]} == {40}


def test_a_request_that_does_not_fit_does_not_block_a_smaller_one() -> None:
    harness = Harness(make_limits(num_pages=24, page_size=4), make_config(headroom_tokens=0))
    running = harness.submit(prompt_of(40, 1), max_tokens=30, ignore_eos=True)
    harness.step()
    large = harness.submit(prompt_of(80, 2), max_tokens=1)
    small = harness.submit(prompt_of(4, 3), max_tokens=1)
    harness.run()
    harness.check_all()
    first = {uid: harness.outcomes[uid].token_steps[0] for uid in (running, large, small)}
    assert first[running] < first[small] < first[large]


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
def test_a_large_request_is_not_overtaken_for_ever(policy: str) -> None:
    config = make_config(max_overtakes=5, headroom_tokens=0)
    harness = Harness(make_limits(num_pages=24, page_size=4), config, policy=policy)
    large = -1
    for step in range(200):
        harness.submit(prompt_of(12, step), max_tokens=4, ignore_eos=True, priority=1)
        if step == 10:
            large = harness.submit(prompt_of(90, 500), max_tokens=1, uid=10_000)
        harness.step()
        if harness.outcomes.get(large) and harness.outcomes[large].finished:
            break
    # At most 5 steps in which others start, then what runs (4 tokens each) has to end first.
    assert 10 < harness.clock < 60
    harness.run()
    harness.check_all()


def test_a_cold_prompt_is_not_starved_by_cached_ones() -> None:
    config = make_config(max_overtakes=8)
    limits = make_limits(num_pages=200, max_running_reqs=2)
    harness = Harness(limits, config, policy="lpm")
    hot = prompt_of(40, 1)
    harness.submit(hot, max_tokens=2)
    harness.run()
    for seed in range(6):
        harness.submit([*hot, seed], max_tokens=3, ignore_eos=True)
    cold = harness.submit(prompt_of(20, 9), max_tokens=1)
    for step in range(100):
        harness.submit([*hot, step, 7], max_tokens=3, ignore_eos=True)
        harness.step()
    assert harness.outcomes[cold].finished
    harness.run()
    harness.check_all()


def test_thousands_of_requests_in_one_call_all_end() -> None:
    limits = make_limits(num_pages=500, page_size=16, max_running_reqs=64)
    harness = Harness(limits, make_config(is_checked_every_step=False))
    for seed in range(3000):
        harness.submit(prompt_of(1 + seed % 7, seed), max_tokens=1 + seed % 3)
    harness.run()
    for uid in range(0, 3000, 7):
        harness.check(uid)
    assert all(len(outcome.finished) == 1 for outcome in harness.outcomes.values())
