"""What every schedule policy has to do; see `minisgl.scheduler.contract`."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl.core import SamplingParams
from minisgl.kvcache.contract import CacheConfig, PrefixCache
from minisgl.kvcache.radix import RadixCache
from minisgl.scheduler.contract import Policy, PolicyConfig, ScheduledReq
from minisgl.testing.selection import TestedBackend


@pytest.fixture
def policy(backend: TestedBackend) -> Policy:
    made: Policy = backend.build(PolicyConfig())
    return made


@pytest.fixture
def cache() -> PrefixCache:
    """A cache that knows prompts of the token 0."""
    cache = RadixCache(CacheConfig(page_size=2))
    cache.insert_prefix(np.zeros(20, np.int32), np.arange(10, dtype=np.int32))
    return cache


def make_waiting(num_reqs: int) -> list[ScheduledReq]:
    """Make requests in order of arrival, with prompts that are known to different lengths."""
    reqs = []
    for arrival in range(num_reqs):
        prompt = np.zeros(30, dtype=np.int32)
        prompt[arrival * 7 % 30 :] = arrival + 1
        req = ScheduledReq(arrival, prompt, 40, SamplingParams())
        req.arrival, req.priority = arrival, arrival * 5 % 3 - 1
        reqs.append(req)
    return reqs


def order(policy: Policy, waiting: list[ScheduledReq], cache: PrefixCache) -> list[int]:
    return [req.uid for req in policy.order(iter(waiting), cache)]


def test_nobody_waits(policy: Policy, cache: PrefixCache) -> None:
    assert order(policy, [], cache) == [], "order of no requests is none"


@pytest.mark.parametrize("num_reqs", [1, 2, 40, 500])
def test_only_waiting_requests_are_ordered(
    policy: Policy, cache: PrefixCache, num_reqs: int
) -> None:
    chosen = order(policy, make_waiting(num_reqs), cache)
    assert len(set(chosen)) == len(chosen), "order returns no request twice"
    assert set(chosen) <= set(range(num_reqs)), "order returns requests that wait"
    assert chosen, "order names somebody when requests wait, or nothing would ever start"


def test_two_policies_agree(backend: TestedBackend, cache: PrefixCache) -> None:
    waiting = make_waiting(60)
    orders = [order(backend.build(PolicyConfig()), waiting, cache) for _ in range(3)]
    assert orders[0] == orders[1] == orders[2], "every rank gets the same order"


def test_everybody_starts_in_the_end(policy: Policy, cache: PrefixCache) -> None:
    waiting = make_waiting(200)
    for _ in range(200):
        first = next(iter(policy.order(iter(waiting), cache)))
        waiting.remove(first)
    assert waiting == [], "the first of the order can always start"


def test_requests_and_cache_are_not_changed(policy: Policy, cache: PrefixCache) -> None:
    waiting = make_waiting(30)
    before = [(str(req), req.priority, req.arrival, req.token_ids.tolist()) for req in waiting]
    pages, sizes = sorted(cache.check_integrity().tolist()), cache.sizes()
    order(policy, waiting, cache)
    after = [(str(req), req.priority, req.arrival, req.token_ids.tolist()) for req in waiting]
    assert after == before, "order does not change requests"
    assert sorted(cache.check_integrity().tolist()) == pages, "order does not change the cache"
    assert cache.sizes() == sizes, "order leaves no lock behind"


def test_ranks_are_distinct_and_stay(policy: Policy, cache: PrefixCache) -> None:
    waiting = make_waiting(50)
    ranks = [policy.rank(req) for req in waiting]
    assert len(set(ranks)) == 50, "no two requests have the same rank"
    order(policy, waiting, cache)
    waiting[3].num_retractions += 1
    waiting[3].append_host(5)
    assert [policy.rank(req) for req in waiting] == ranks, "a request's rank never changes"
