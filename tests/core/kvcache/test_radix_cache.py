"""What the conformance suite cannot see: the tree's own self-check, and its limits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from minisgl.errors import IntegrityError
from minisgl.kvcache.contract import CacheConfig
from minisgl.kvcache.radix import RadixCache
from minisgl.kvcache.radix_node import RadixNode

Fault = Callable[[RadixCache, RadixNode], None]


def tokens(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


@pytest.fixture
def cache() -> RadixCache:
    """Pages of 2 tokens: 1 2 3 4 on pages 0 1, then 5 6 on page 2 or 7 8 on page 3."""
    cache = RadixCache(CacheConfig(page_size=2))
    cache.insert_prefix(tokens(1, 2, 3, 4, 5, 6), tokens(0, 1, 2))
    cache.insert_prefix(tokens(1, 2, 3, 4, 7, 8), tokens(9, 9, 3))
    return cache


@pytest.fixture
def shared(cache: RadixCache) -> RadixNode:
    """The node of pages 0 and 1."""
    (node,) = cache._root.children.values()
    return node


def count_too_many_evictable(cache: RadixCache, shared: RadixNode) -> None:
    cache._num_evictable += 1


def count_too_few_protected(cache: RadixCache, shared: RadixNode) -> None:
    cache._num_protected -= 1


def own_a_page_twice(cache: RadixCache, shared: RadixNode) -> None:
    shared.pages[1] = 3


def forget_a_lock(cache: RadixCache, shared: RadixNode) -> None:
    cache.lock(cache.match_prefix(tokens(1, 2, 3, 4, 5, 6)).handle)
    shared.num_locks -= 1


def lock_without_a_handle(cache: RadixCache, shared: RadixNode) -> None:
    cache.lock(cache.match_prefix(tokens(1, 2, 3, 4)).handle)
    shared.num_locks += 1


def keep_a_locked_node_up_for_eviction(cache: RadixCache, shared: RadixNode) -> None:
    cache.lock(cache.match_prefix(tokens(1, 2, 3, 4)).handle)
    cache._unlocked[shared] = None


def evict_parents_first(cache: RadixCache, shared: RadixNode) -> None:
    cache._unlocked.move_to_end(shared, last=False)


def lose_half_a_key(cache: RadixCache, shared: RadixNode) -> None:
    shared.key = shared.key[:-4]


def cut_the_way_up(cache: RadixCache, shared: RadixNode) -> None:
    next(iter(shared.children.values())).parent = cache._root


def keep_a_view(cache: RadixCache, shared: RadixNode) -> None:
    shared.pages = np.arange(5, dtype=np.int32)[:2]


def misplace_the_end(cache: RadixCache, shared: RadixNode) -> None:
    shared.end += 2


def lose_a_subtree(cache: RadixCache, shared: RadixNode) -> None:
    shared.children.clear()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (count_too_many_evictable, "counts 5 evictable pages, the tree has 4"),
        (count_too_few_protected, "counts -1 protected pages, the tree has 0"),
        (own_a_page_twice, "page 3 is in two places"),
        (forget_a_lock, "has 0 locks and 1 locked children|missing from eviction"),
        (lock_without_a_handle, "counts 1 locks held by handles, the tree has 2"),
        (keep_a_locked_node_up_for_eviction, "is locked and up for eviction"),
        (evict_parents_first, "would be evicted after its parent"),
        (lose_half_a_key, "has 2 pages of 8 bytes and a key of 12 bytes"),
        (cut_the_way_up, "is not linked to the node that holds it"),
        (keep_a_view, "does not own its page array"),
        (misplace_the_end, "its parent ends at 0"),
        (lose_a_subtree, "3 nodes wait for eviction, the tree has 1 unlocked"),
    ],
)
def test_the_self_check_finds_every_kind_of_fault(
    cache: RadixCache, shared: RadixNode, fault: Fault, message: str
) -> None:
    cache.check_integrity()
    fault(cache, shared)
    with pytest.raises(IntegrityError, match=message):
        cache.check_integrity()


def test_eviction_takes_no_more_than_was_asked_for(cache: RadixCache) -> None:
    assert cache.evict(1).tolist() == [2]
    assert cache.evict(2).tolist() == [3, 1]
    assert cache.match_prefix(tokens(1, 2, 3, 4)).pages.tolist() == [0]


def test_a_handle_of_a_prefix_that_lost_its_tail_is_refused(cache: RadixCache) -> None:
    cache.evict(2)
    handle = cache.match_prefix(tokens(1, 2, 3, 4)).handle
    cache.evict(1)
    with pytest.raises(IntegrityError, match="the prefix of 4 tokens was evicted"):
        cache.lock(handle)


def test_an_unlock_counts_as_a_use(cache: RadixCache) -> None:
    first = cache.match_prefix(tokens(1, 2, 3, 4, 5, 6)).handle
    cache.lock(first)
    cache.match_prefix(tokens(1, 2, 3, 4, 7, 8))
    cache.unlock(first)
    assert cache.evict(1).tolist() == [3]


def test_tokens_and_pages_have_to_agree(cache: RadixCache) -> None:
    with pytest.raises(IntegrityError, match="insert 3 tokens with 2 pages of 2 tokens"):
        cache.insert_prefix(tokens(1, 2, 3), tokens(5, 6))


def test_tokens_of_another_integer_type_match_too(cache: RadixCache) -> None:
    assert cache.match_prefix(np.array([1, 2, 3, 4], dtype=np.int64)).handle.cached_len == 4


def test_duplicates_and_what_was_not_taken_stay_with_the_caller(cache: RadixCache) -> None:
    offered = tokens(0, 7, 8)
    result = cache.insert_prefix(tokens(1, 2, 3, 4, 9, 9), offered)
    assert result.pages.tolist() == [0, 1, 8]
    assert result.not_taken(offered).tolist() == [7]


def test_ten_thousand_prompts_leave_no_more_nodes_than_pages() -> None:
    cache = RadixCache(CacheConfig(page_size=1))
    for uid in range(10_000):
        cache.insert_prefix(tokens(uid % 7, uid), tokens(1000 + uid % 7, uid % 32))
        if sum(cache.sizes()) > 32:
            cache.evict(1)
    num_nodes, stack = 0, [cache._root]
    while stack:
        node = stack.pop()
        num_nodes += 1
        stack.extend(node.children.values())
    assert num_nodes <= 33


def test_steps_of_an_eviction_do_not_depend_on_the_size_of_the_tree() -> None:
    """Count what eviction looks at, so that no clock is needed; a quarter of all leaves is used."""
    looked_at = {}
    for num_leaves in (100, 10_000):
        cache = RadixCache(CacheConfig(page_size=1))
        for leaf in range(num_leaves):
            cache.insert_prefix(tokens(leaf), tokens(leaf))
        for leaf in range(num_leaves // 4):
            cache.match_prefix(tokens(leaf))
        before = [*cache._unlocked][:10]
        cache.evict(10)
        looked_at[num_leaves] = sum(node.end == -1 for node in before)
    assert looked_at == {100: 10, 10_000: 10}
