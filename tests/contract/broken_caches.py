"""Radix caches with one fault each, of the kinds that real engines had.

None of them checks itself: `check_integrity` only lists the pages, so that the conformance suite
has to notice the fault from outside.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from minisgl.errors import CapacityError
from minisgl.kvcache.contract import CacheConfig, CacheHandle, InsertResult, MatchResult
from minisgl.kvcache.radix import RadixCache, RadixHandle
from minisgl.kvcache.radix_node import RadixNode


class UncheckedCache(RadixCache):
    """No fault; it only believes itself."""

    def check_integrity(self) -> np.ndarray:
        pages, stack = [self._root.pages], [self._root]
        while stack:
            node = stack.pop()
            pages.append(node.pages)
            stack.extend(node.children.values())
        return np.concatenate(pages)


class HasNoCheck(RadixCache):
    """Its self-check looks at nothing."""

    def check_integrity(self) -> np.ndarray:
        return np.empty(0, dtype=np.int32)


class LeavesTheMatchedNodeUnlocked(UncheckedCache):
    """A lock covers what is above the matched node, not the node itself."""

    def lock(self, handle: CacheHandle) -> None:
        assert isinstance(handle, RadixHandle)
        end, handle.node = handle.node, handle.node.parent or handle.node
        handle.cached_len = handle.node.end
        super().lock(handle)
        handle.cached_len = end.end


class SplitMakesTheTailYoung(UncheckedCache):
    """The tail of a split node looks as used as its head."""

    def _split(self, node: RadixNode, num_head_pages: int) -> RadixNode:
        head = super()._split(node, num_head_pages)
        if node.num_locks == 0:
            self._unlocked.move_to_end(node)
        return head


class SplitLeavesTheHeadOld(UncheckedCache):
    """A match does not count as a use."""

    def match_prefix(self, token_ids: np.ndarray) -> MatchResult:
        before = list(self._unlocked)
        result = super().match_prefix(token_ids)
        heads = [node for node in self._unlocked if node not in before]
        order: list[RadixNode] = []
        for node in before:
            order += [node, *(head for head in heads if node.parent is head)]
        self._unlocked = OrderedDict.fromkeys(order)
        return result


class KeepsTheCallersPages(UncheckedCache):
    """A node holds a view of the array that was offered."""

    def insert_prefix(self, token_ids: np.ndarray, pages: np.ndarray) -> InsertResult:
        result = super().insert_prefix(token_ids, pages)
        if result.num_known_pages < len(pages):
            assert isinstance(result.handle, RadixHandle)
            result.handle.node.pages = pages[result.num_known_pages :]
        return result


class HandsOutItsOwnPages(UncheckedCache):
    """A match returns a node's array instead of a copy."""

    def match_prefix(self, token_ids: np.ndarray) -> MatchResult:
        handle, pages = super().match_prefix(token_ids)
        assert isinstance(handle, RadixHandle)
        own = handle.node.pages
        return MatchResult(handle, own if len(own) == len(pages) else pages)


class CountsSplitPagesTwice(UncheckedCache):
    """A counter drifts whenever a node is split."""

    def _split(self, node: RadixNode, num_head_pages: int) -> RadixNode:
        self._num_evictable += num_head_pages
        return super()._split(node, num_head_pages)


class ComparesTheFirstTokenOfEachPage(UncheckedCache):
    """Two pages with the same first token are the same page."""

    def match_prefix(self, token_ids: np.ndarray) -> MatchResult:
        return super().match_prefix(self._blurred(token_ids))

    def insert_prefix(self, token_ids: np.ndarray, pages: np.ndarray) -> InsertResult:
        return super().insert_prefix(self._blurred(token_ids), pages)

    def _blurred(self, token_ids: np.ndarray) -> np.ndarray:
        return np.repeat(token_ids[:: self._page_size], self._page_size)[: len(token_ids)]


class CountsTokensOfHalfPages(UncheckedCache):
    """A match claims more tokens than its pages hold."""

    def match_prefix(self, token_ids: np.ndarray) -> MatchResult:
        result = super().match_prefix(token_ids)
        result.handle.cached_len = min(
            len(token_ids), result.handle.cached_len + self._page_size - 1
        )
        return result


class LeaksALock(UncheckedCache):
    """An unlock stops one node below the top."""

    def unlock(self, handle: CacheHandle) -> None:
        assert isinstance(handle, RadixHandle)
        parent = handle.node.parent
        if parent is not None:
            parent.num_locks += 1
        super().unlock(handle)


class UnlocksAnything(UncheckedCache):
    """Takes no notice of an unlock that nobody's lock was before."""

    def unlock(self, handle: CacheHandle) -> None:
        assert isinstance(handle, RadixHandle)
        if handle.num_locks:
            super().unlock(handle)


class LocksWhatIsGone(UncheckedCache):
    """Takes no notice of a lock that comes too late."""

    def lock(self, handle: CacheHandle) -> None:
        assert isinstance(handle, RadixHandle)
        if handle.node.end == handle.cached_len:
            super().lock(handle)


class LosesLocksOnSplit(UncheckedCache):
    """The head of a locked node that is split starts unlocked."""

    def _split(self, node: RadixNode, num_head_pages: int) -> RadixNode:
        head = super()._split(node, num_head_pages)
        if head.num_locks:
            head.num_locks = 0
            self._unlocked[head] = None
        return head


class TakesWhatItKnew(UncheckedCache):
    """Claims an offered page although it has another one for the same tokens."""

    def insert_prefix(self, token_ids: np.ndarray, pages: np.ndarray) -> InsertResult:
        result = super().insert_prefix(token_ids, pages)
        return result._replace(num_known_pages=max(result.num_known_pages - 1, 0))


class OwnsOnePageTwice(UncheckedCache):
    """The first of the new pages is put in front of the known ones as well."""

    def insert_prefix(self, token_ids: np.ndarray, pages: np.ndarray) -> InsertResult:
        result = super().insert_prefix(token_ids, pages)
        assert isinstance(result.handle, RadixHandle)
        node = result.handle.node
        if 0 < result.num_known_pages < len(pages) and node.parent is not None:
            node.parent.pages[-1] = node.pages[0]
        return result


class EvictsLockedPages(UncheckedCache):
    """Locked nodes stay in the order of eviction."""

    def lock(self, handle: CacheHandle) -> None:
        super().lock(handle)
        assert isinstance(handle, RadixHandle)
        node = handle.node
        while node.parent is not None:
            self._unlocked[node] = None
            node = node.parent


class EvictsOnePageTooFew(UncheckedCache):
    """Off by one."""

    def evict(self, num_pages: int) -> np.ndarray:
        return super().evict(max(num_pages - 1, 0))


class EvictsWhatItCanAndThenRefuses(UncheckedCache):
    """A refused eviction leaves half of it done."""

    def evict(self, num_pages: int) -> np.ndarray:
        if num_pages > self._num_evictable:
            super().evict(self._num_evictable)
            raise CapacityError("evict: not enough")
        return super().evict(num_pages)


class FindsEvictedPages(UncheckedCache):
    """The index keeps an entry for a page that was evicted."""

    def _remove(self, leaf: RadixNode) -> None:
        parent, end = leaf.parent, leaf.end
        super()._remove(leaf)
        if parent is not None:
            leaf.parent, leaf.end = parent, end
            parent.children[leaf.key[: self._page_bytes]] = leaf
            self._unlocked[leaf] = None
            self._num_evictable += len(leaf.pages)


class RemembersEveryPrompt(UncheckedCache):
    """Grows for ever."""

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(config)
        self._seen: list[bytes] = []

    def insert_prefix(self, token_ids: np.ndarray, pages: np.ndarray) -> InsertResult:
        self._seen.append(token_ids.tobytes())
        return super().insert_prefix(token_ids, pages)


class SplitsIntoViews(UncheckedCache):
    """The halves of a node are views that keep the whole alive."""

    def _split(self, node: RadixNode, num_head_pages: int) -> RadixNode:
        whole = node.pages
        head = super()._split(node, num_head_pages)
        head.pages, node.pages = whole[:num_head_pages], whole[num_head_pages:]
        return head


class LocksOnceOnly(UncheckedCache):
    """A second lock of a handle is not counted."""

    def lock(self, handle: CacheHandle) -> None:
        assert isinstance(handle, RadixHandle)
        if handle.num_locks == 0:
            super().lock(handle)

    def unlock(self, handle: CacheHandle) -> None:
        assert isinstance(handle, RadixHandle)
        if handle.num_locks:
            super().unlock(handle)
