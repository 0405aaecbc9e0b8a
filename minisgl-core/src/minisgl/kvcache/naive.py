"""The prefix cache that remembers nothing: every request computes its whole prompt."""

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


class NaiveHandle(CacheHandle):
    """The empty prefix, the only one that is known."""

    cached_len = 0


class NaiveCache(PrefixCache):
    """Takes no page and finds no prefix, so that all pages stay with the requests."""

    def __init__(self, config: CacheConfig) -> None:
        """Make a cache; the page size does not matter."""
        del config
        self._num_locks = 0

    def match_prefix(self, token_ids: np.ndarray) -> MatchResult:
        """Find nothing."""
        del token_ids
        return MatchResult(NaiveHandle(), _no_pages())

    def lock(self, handle: CacheHandle) -> None:
        """Count the lock; there is nothing to keep."""
        del handle
        self._num_locks += 1

    def unlock(self, handle: CacheHandle) -> None:
        """Take a lock back.

        Raises:
            IntegrityError: Nothing is locked.
        """
        del handle
        if self._num_locks == 0:
            raise IntegrityError("unlock: the handle is not locked")
        self._num_locks -= 1

    def insert_prefix(self, token_ids: np.ndarray, pages: np.ndarray) -> InsertResult:
        """Take none of the pages: all of them stay the caller's."""
        del token_ids, pages
        return InsertResult(NaiveHandle(), _no_pages(), num_known_pages=0)

    def evict(self, num_pages: int) -> np.ndarray:
        """Give up nothing.

        Raises:
            CapacityError: More than 0 pages were wanted.
        """
        if num_pages > 0:
            raise CapacityError(f"evict {num_pages} pages: only 0 are evictable")
        return _no_pages()

    def sizes(self) -> CacheSizes:
        """Count no page."""
        return CacheSizes(evictable=0, protected=0)

    def check_integrity(self) -> np.ndarray:
        """Own no page, which is always right."""
        return _no_pages()


def _no_pages() -> np.ndarray:
    return np.empty(0, dtype=np.int32)
