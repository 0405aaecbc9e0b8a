"""A shared prefix is computed once, and no page is used before it is computed or after it went."""

from __future__ import annotations

import pytest

from minisgl.testing.fake_engine import make_limits
from tests.core.scheduler.harness import Harness, make_config

SHARED = [11 * i % 89 for i in range(40)]


def make_harness(page_size: int = 4, cache: str = "radix", **fields: object) -> Harness:
    limits = make_limits(num_pages=1600 // page_size, page_size=page_size, max_running_reqs=16)
    return Harness(limits, make_config(**fields), cache)


@pytest.mark.parametrize("page_size", [1, 4, 8])
def test_a_prefix_shared_by_eight_requests_is_computed_once(page_size: int) -> None:
    harness = make_harness(page_size)
    for uid in range(8):
        harness.submit([*SHARED, uid, uid + 1, uid + 2], max_tokens=4)
    harness.run()
    harness.check_all()
    assert harness.engine.num_prefill_tokens == len(SHARED) + 8 * 3


def test_without_a_cache_nobody_waits_for_a_prefix() -> None:
    harness = make_harness(cache="naive")
    harness.submit([1], max_tokens=1)
    harness.submit([2], max_tokens=1)
    harness.run()
    first = [harness.submit([*SHARED, uid], max_tokens=1) for uid in range(4)]
    harness.run()
    second = [harness.submit([*SHARED, uid], max_tokens=1) for uid in range(4)]
    harness.run()
    harness.check_all()
    for uids in (first, second):
        steps = {harness.outcomes[uid].token_steps[0] for uid in uids}
        assert len(steps) <= 2  # one step is how it learns that the cache keeps nothing
    assert len({harness.outcomes[uid].token_steps[0] for uid in second}) == 1


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_the_last_token_of_a_cached_prompt_is_computed_again(page_size: int, offset: int) -> None:
    harness = make_harness(page_size)
    prompt = SHARED[: max(1, 2 * page_size + offset)]
    for _ in range(2):
        harness.submit(prompt, max_tokens=5)
        harness.run()
    harness.check_all()
    cached = harness.outcomes[1].end.num_cached_tokens
    assert cached == (len(prompt) - 1) // page_size * page_size
    assert harness.engine.num_prefill_tokens == 2 * len(prompt) - cached


@pytest.mark.parametrize("num_twins", [2, 5, 8])
@pytest.mark.parametrize("chunk", [1, 3, 7, 16, 64])
def test_twins_that_come_in_chunks_get_the_same_tokens(num_twins: int, chunk: int) -> None:
    harness = make_harness(max_prefill_length=chunk)
    for _ in range(num_twins):
        harness.submit(SHARED, max_tokens=6)
    harness.run()
    harness.check_all()
    assert harness.engine.num_prefill_tokens < 2 * len(SHARED) + 4 * num_twins


def test_a_prompt_computed_twice_in_one_batch_leaves_one_copy_in_the_cache() -> None:
    harness = make_harness(min_shared_tokens=1000)  # so that nobody waits
    for _ in range(2):
        harness.submit(SHARED, max_tokens=8)
    harness.run()
    harness.check_all()
    assert harness.engine.num_prefill_tokens == 2 * len(SHARED)
    assert harness.cache.sizes().evictable == (len(SHARED) + 7) // 4


def test_duplicate_pages_are_free_while_their_request_still_runs() -> None:
    harness = make_harness(min_shared_tokens=1000)
    for _ in range(2):
        harness.submit(SHARED[:32], max_tokens=20)
    for _ in range(3):
        harness.step()
    stats = harness.scheduler.stats()
    assert stats.num_running == 2
    assert stats.num_pages - stats.num_free_pages == 32 // 4 + 2


def test_a_follow_up_finds_prompt_and_answer_in_the_cache() -> None:
    harness = make_harness(page_size=1)
    harness.submit(SHARED, max_tokens=10, ignore_eos=True)
    harness.run()
    conversation = [*SHARED, *harness.outcomes[0].tokens, 1, 2, 3]
    harness.submit(conversation, max_tokens=3)
    harness.run()
    harness.check_all()
    assert harness.outcomes[1].end.num_cached_tokens == len(SHARED) + 9  # the last has no KV


def test_a_request_behind_the_one_that_waits_for_a_prefix_starts_at_once() -> None:
    harness = make_harness()
    leader = harness.submit([*SHARED, 1], max_tokens=1)
    follower = harness.submit([*SHARED, 2], max_tokens=1)
    other = harness.submit([50] * 20, max_tokens=1)
    harness.run()
    harness.check_all()
    steps = {uid: harness.outcomes[uid].token_steps[0] for uid in (leader, follower, other)}
    assert steps[leader] == steps[other] == steps[follower] - 1


def test_the_leader_of_a_prefix_may_be_aborted_between_its_chunks() -> None:
    harness = make_harness(max_prefill_length=8)
    harness.submit([*SHARED, 1], max_tokens=4)
    harness.submit([*SHARED, 2], max_tokens=4)
    harness.step()
    harness.step()
    harness.abort(0)
    harness.run()
    harness.check_all()
    assert harness.outcomes[0].end.reason == "abort"
    assert harness.outcomes[1].end.num_cached_tokens == 16
