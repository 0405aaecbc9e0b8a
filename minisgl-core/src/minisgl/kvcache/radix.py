"""The radix-tree prefix cache: prefixes share pages, the least recently used go first.

Keys are token bytes, so that comparing a node is one memory comparison, and they are cut at page
boundaries only, so that a node's key and pages never disagree.

Source of the idea: RadixAttention, arXiv:2312.07104 section 3. The order of eviction is kept in a
linked list instead of by time stamps; see `RadixCache`.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from minisgl.errors import CapacityError, IntegrityError
from minisgl.kvcache.contract import (
    CacheConfig,
    CacheHandle,
    CacheSizes,
    InsertResult,
    MatchResult,
    PrefixCache,
)
from minisgl.kvcache.radix_check import check_tree
from minisgl.kvcache.radix_node import RadixNode, common_pages

_TOKEN_BYTES = 4


class RadixHandle(CacheHandle):
    """The end of a node: splitting a node leaves it, and so the handle, where its tokens end."""

    __slots__ = ("cached_len", "node", "num_locks")

    def __init__(self, node: RadixNode) -> None:
        """Point to the end of ``node``."""
        self.node = node
        self.cached_len = node.end
        self.num_locks = 0


class RadixCache(PrefixCache):
    """A tree whose paths from the root are the known prefixes.

    Two rules make every operation cheap, whatever the size of the tree:

    * ``node.num_locks`` counts the handles locked at the node itself and the children that are
      locked, so a lock climbs only as far as nothing is locked yet. The locked nodes are closed
      towards the root.
    * ``_unlocked`` lists all unlocked nodes by last use, and whoever uses a node uses its
      ancestors after it. So a node stands before its parent, the first one is always the least
      recently used leaf, and eviction takes it without a search. Using a node means to match it,
      to insert it, or to unlock it.
    """

    def __init__(self, config: CacheConfig) -> None:
        """Make an empty cache."""
        self._page_size = config.page_size
        self._page_bytes = config.page_size * _TOKEN_BYTES
        self._root = RadixNode(b"", np.empty(0, dtype=np.int32), None, 0)
        self._unlocked: OrderedDict[RadixNode, None] = OrderedDict()
        self._num_evictable = 0
        self._num_protected = 0
        self._num_handle_locks = 0

    def match_prefix(self, token_ids: np.ndarray) -> MatchResult:
        """Find the longest known prefix, whole pages only, and mark it as just used.

        A node of which only the head matches is split, so that the unused tail ages on its own.
        """
        key = _key_of(token_ids)
        node, path_pages = self._descend(key, len(key) // self._page_bytes)
        self._touch(node)
        return MatchResult(RadixHandle(node), _joined(path_pages))

    def lock(self, handle: CacheHandle) -> None:
        """Keep the whole prefix of ``handle`` from eviction; locks nest.

        Raises:
            IntegrityError: The prefix was evicted since the handle was made.
        """
        assert isinstance(handle, RadixHandle), f"{handle!r} is not a handle of this cache"
        if handle.node.end != handle.cached_len:
            raise IntegrityError(
                f"lock: the prefix of {handle.cached_len} tokens was evicted; lock a handle before "
                "anything evicts"
            )
        handle.num_locks += 1
        self._num_handle_locks += 1
        node: RadixNode | None = handle.node
        while node is not None:
            node.num_locks += 1
            if node.num_locks > 1:
                break
            if node is not self._root:
                del self._unlocked[node]
            self._num_evictable -= len(node.pages)
            self._num_protected += len(node.pages)
            node = node.parent

    def unlock(self, handle: CacheHandle) -> None:
        """Take one lock of ``handle`` back; what is no longer locked counts as just used.

        Raises:
            IntegrityError: The handle is not locked.
        """
        assert isinstance(handle, RadixHandle), f"{handle!r} is not a handle of this cache"
        if handle.num_locks == 0:
            raise IntegrityError(
                f"unlock: the handle of a prefix of {handle.cached_len} tokens is not locked"
            )
        handle.num_locks -= 1
        self._num_handle_locks -= 1
        node: RadixNode | None = handle.node
        while node is not None:
            node.num_locks -= 1
            if node.num_locks > 0:
                break
            if node is not self._root:
                self._unlocked[node] = None
            self._num_evictable += len(node.pages)
            self._num_protected -= len(node.pages)
            node = node.parent

    def insert_prefix(self, token_ids: np.ndarray, pages: np.ndarray) -> InsertResult:
        """Take the pages behind what is known; see `PrefixCache.insert_prefix`.

        Raises:
            IntegrityError: ``token_ids`` are not as many whole pages as ``pages``.
        """
        num_pages = len(pages)
        if len(token_ids) != num_pages * self._page_size:
            raise IntegrityError(
                f"insert {len(token_ids)} tokens with {num_pages} pages of {self._page_size} "
                f"tokens: must be {num_pages * self._page_size} tokens"
            )
        key = _key_of(token_ids)
        node, path_pages = self._descend(key, num_pages)
        num_known = node.end // self._page_size
        if num_known < num_pages:
            new_pages = np.array(pages[num_known:], dtype=np.int32)  # our own copy
            rest = key[num_known * self._page_bytes :]
            leaf = RadixNode(rest, new_pages, node, len(token_ids))
            node.children[rest[: self._page_bytes]] = leaf
            self._unlocked[leaf] = None
            self._num_evictable += len(new_pages)
            path_pages.append(new_pages)
            node = leaf
        self._touch(node)
        return InsertResult(RadixHandle(node), _joined(path_pages), num_known)

    def evict(self, num_pages: int) -> np.ndarray:
        """Give up exactly ``num_pages`` pages; the last leaf loses only its tail.

        Raises:
            CapacityError: Fewer than ``num_pages`` are evictable. Nothing was changed.
        """
        if num_pages > self._num_evictable:
            raise CapacityError(
                f"evict {num_pages} pages: only {self._num_evictable} are evictable"
            )
        freed: list[np.ndarray] = []
        missing = num_pages
        while missing > 0:
            leaf = next(iter(self._unlocked))
            if len(leaf.pages) <= missing:
                freed.append(leaf.pages)
                self._remove(leaf)
            else:
                freed.append(leaf.cut_tail(missing, self._page_bytes, self._page_size))
            missing -= len(freed[-1])
        self._num_evictable -= max(num_pages, 0)
        return _joined(freed)

    def sizes(self) -> CacheSizes:
        """Count the pages that the cache owns, in constant time."""
        return CacheSizes(self._num_evictable, self._num_protected)

    def check_integrity(self) -> np.ndarray:
        """Walk the tree and compare it with the counters and the order of eviction.

        Raises:
            IntegrityError: Something is wrong; the message says what.
        """
        counted = check_tree(self._root, self._unlocked, self._page_size, self._page_bytes)
        for name, kept, found in (
            ("evictable pages", self._num_evictable, counted.num_evictable),
            ("protected pages", self._num_protected, counted.num_protected),
            ("locks held by handles", self._num_handle_locks, counted.num_handle_locks),
        ):
            if kept != found:
                raise IntegrityError(f"radix cache: counts {kept} {name}, the tree has {found}")
        return counted.pages

    def _descend(self, key: bytes, num_pages: int) -> tuple[RadixNode, list[np.ndarray]]:
        """Follow the first ``num_pages`` pages of ``key`` as far as they are known.

        Returns:
            The node where the known prefix ends, after a split if need be, and the page arrays
            along the path; they are the nodes' own.
        """
        page_bytes = self._page_bytes
        stop = num_pages * page_bytes
        node, at = self._root, 0
        path_pages: list[np.ndarray] = []
        while at < stop:
            child = node.children.get(key[at : at + page_bytes])
            if child is None:
                break
            end = at + len(child.key)
            if end > stop or not key.startswith(child.key, at):
                num_common = common_pages(child.key, key, at, stop, page_bytes)
                child = self._split(child, num_common)
                path_pages.append(child.pages)
                return child, path_pages
            path_pages.append(child.pages)
            node, at = child, end
        return node, path_pages

    def _split(self, node: RadixNode, num_head_pages: int) -> RadixNode:
        """Put the first pages of ``node`` into a new parent; ``node`` keeps its end and handles."""
        head = node.split_head(num_head_pages, self._page_bytes, self._page_size)
        if head.num_locks == 0:
            # Out of order until the caller touches the path, which puts it where it belongs.
            self._unlocked[head] = None
        return head

    def _touch(self, node: RadixNode) -> None:
        """Mark a path as just used, from its end towards the root."""
        at: RadixNode | None = node
        # Locked nodes are in no order, and neither is anything above them.
        while at is not None and at.num_locks == 0 and at is not self._root:
            self._unlocked.move_to_end(at)
            at = at.parent

    def _remove(self, leaf: RadixNode) -> None:
        """Take an unlocked leaf out of the tree; handles that still point to it see that."""
        assert not leaf.children, "a node stands before its parent, so the first one is a leaf"
        assert leaf.parent is not None, "the root is not listed"
        del self._unlocked[leaf]
        del leaf.parent.children[leaf.key[: self._page_bytes]]
        leaf.parent = None
        leaf.end = -1


def _key_of(token_ids: np.ndarray) -> bytes:
    """Return the tokens as bytes, a copy that nobody can change."""
    return np.asarray(token_ids, dtype=np.int32).tobytes()


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    """Concatenate into a new array."""
    if not arrays:
        return np.empty(0, dtype=np.int32)
    return np.concatenate(arrays)
