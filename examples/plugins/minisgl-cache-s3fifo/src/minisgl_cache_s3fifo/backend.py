"""The prefix cache ``s3fifo``: a tree of pages whose leaves go in the order of S3-FIFO."""

from __future__ import annotations

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
from minisgl_cache_s3fifo.page_node import PageNode
from minisgl_cache_s3fifo.queues import EvictionQueues
from minisgl_cache_s3fifo.settings import S3FifoSettings

_TOKEN_BYTES = 4


class S3FifoHandle(CacheHandle):
    """The last page of a prefix."""

    __slots__ = ("cached_len", "node", "num_locks")

    def __init__(self, node: PageNode, cached_len: int) -> None:
        """Point to ``node``."""
        self.node = node
        self.cached_len = cached_len
        self.num_locks = 0

    @property
    def is_evicted(self) -> bool:
        """Whether the cache has given up the last page."""
        return self.node.parent is None and not self.node.is_root


class S3FifoCache(PrefixCache):
    """Tells pages that prove useful from those that come once.

    Unlike with an order of use, a flood of prompts that nobody repeats passes through a tenth of
    the cache and leaves the rest as it is.
    """

    def __init__(self, config: CacheConfig) -> None:
        """Make an empty cache."""
        settings = config.settings or S3FifoSettings()
        assert isinstance(settings, S3FifoSettings), "the spec names this class"
        self._page_size = config.page_size
        self._page_bytes = config.page_size * _TOKEN_BYTES
        self._root = PageNode(b"", -1, None)
        self._queues = EvictionQueues(settings.small_share)
        self._num_pages = 0
        self._num_protected = 0

    def match_prefix(self, token_ids: np.ndarray) -> MatchResult:
        """Find the longest known prefix, whole pages only, and count a use of each page."""
        path = self._descend(self._pages_in(token_ids))
        for node in path:
            node.use()
        return MatchResult(self._handle(path), _pages_of(path))

    def lock(self, handle: CacheHandle) -> None:
        """Keep the whole prefix of ``handle`` from eviction; locks nest.

        Raises:
            IntegrityError: The prefix was evicted since the handle was made.
        """
        assert isinstance(handle, S3FifoHandle), f"{handle!r} is not a handle of this cache"
        if handle.is_evicted:
            raise IntegrityError(
                f"lock: the prefix of {handle.cached_len} tokens was evicted; lock a handle before "
                "anything evicts"
            )
        handle.num_locks += 1
        for node in handle.node.upwards():
            node.num_locks += 1
            if node.num_locks > 1:
                break  # those above count this node's locks as one
            self._num_protected += 1
            self._queues.remove(node)

    def unlock(self, handle: CacheHandle) -> None:
        """Take one lock of ``handle`` back.

        Raises:
            IntegrityError: The handle is not locked.
        """
        assert isinstance(handle, S3FifoHandle), f"{handle!r} is not a handle of this cache"
        if handle.num_locks == 0:
            raise IntegrityError(
                f"unlock: the handle of a prefix of {handle.cached_len} tokens is not locked"
            )
        handle.num_locks -= 1
        for node in handle.node.upwards():
            node.num_locks -= 1
            if node.num_locks > 0:
                break
            self._num_protected -= 1
            if not node.children:
                self._queues.append(node)

    def insert_prefix(self, token_ids: np.ndarray, pages: np.ndarray) -> InsertResult:
        """Take the pages behind what is known."""
        keys = self._pages_in(token_ids)
        path = self._descend(keys)
        num_known = len(path)
        for node in path:
            node.use()
        at = path[-1] if path else self._root
        for tokens, page in zip(keys[num_known:], pages[num_known:].tolist(), strict=True):
            node = PageNode(tokens, page, at)
            at.children[tokens] = node
            self._queues.admit(node)
            path.append(node)
            at = node
        if len(path) > num_known:
            self._num_pages += len(path) - num_known
            self._queues.append(at)
            if num_known:
                self._queues.remove(path[num_known - 1])
        return InsertResult(self._handle(path), _pages_of(path), num_known)

    def evict(self, num_pages: int) -> np.ndarray:
        """Give up exactly ``num_pages`` unlocked pages.

        Raises:
            CapacityError: Fewer than ``num_pages`` are evictable. Nothing was changed.
        """
        num_evictable = self._num_pages - self._num_protected
        if num_pages > num_evictable:
            raise CapacityError(f"evict {num_pages} pages: only {num_evictable} are evictable")
        given_up = []
        for _ in range(num_pages):
            node = self._queues.pop(self._num_pages)
            parent = node.parent
            assert parent is not None, "what waits for eviction is in the tree"
            del parent.children[node.tokens]
            node.parent = None
            self._num_pages -= 1
            given_up.append(node)
            if not (parent.is_root or parent.children or parent.num_locks):
                self._queues.put_first(parent)
        self._queues.forget_ghosts(self._num_pages)
        return _pages_of(given_up)

    def sizes(self) -> CacheSizes:
        """Count the pages that the cache owns, in constant time."""
        return CacheSizes(self._num_pages - self._num_protected, self._num_protected)

    def check_integrity(self) -> np.ndarray:
        """Walk the tree and compare it with the counters and the queues.

        Raises:
            IntegrityError: Something is wrong; the message says what.
        """
        nodes: list[PageNode] = []
        waiting = [self._root]
        while waiting:
            node = waiting.pop()
            num_locked = sum(child.num_locks > 0 for child in node.children.values())
            if not node.is_root and node.num_locks < num_locked:
                raise IntegrityError(f"s3fifo: page {node.page} has fewer locks than children")
            waiting += node.children.values()
            nodes.append(node)
        del nodes[0]
        leaves = {node for node in nodes if not node.children and not node.num_locks}
        for name, kept, found in (
            ("pages", self._num_pages, len(nodes)),
            ("locked pages", self._num_protected, sum(node.num_locks > 0 for node in nodes)),
            ("waiting leaves", len(self._queues.waiting()), len(leaves)),
            ("on probation", self._queues.num_on_probation, sum(not n.is_main for n in nodes)),
        ):
            if kept != found:
                raise IntegrityError(f"s3fifo: counts {kept} {name}, the tree has {found}")
        if leaves != self._queues.waiting():
            raise IntegrityError("s3fifo: the queues hold something else than the unlocked leaves")
        return _pages_of(nodes)

    def _pages_in(self, token_ids: np.ndarray) -> list[bytes]:
        """Cut tokens into the bytes of whole pages; copies that nobody can change."""
        data = np.asarray(token_ids, dtype=np.int32).tobytes()
        end = len(data) - self._page_bytes + 1
        return [data[at : at + self._page_bytes] for at in range(0, end, self._page_bytes)]

    def _descend(self, keys: list[bytes]) -> list[PageNode]:
        """Follow pages from the root as far as they are known."""
        path, node = [], self._root
        for tokens in keys:
            child = node.children.get(tokens)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def _handle(self, path: list[PageNode]) -> S3FifoHandle:
        return S3FifoHandle(path[-1] if path else self._root, len(path) * self._page_size)


def _pages_of(nodes: list[PageNode]) -> np.ndarray:
    return np.array([node.page for node in nodes], dtype=np.int32)
