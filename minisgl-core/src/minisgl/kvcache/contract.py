"""The prefix-cache contract: which pages hold the KV of which token prefixes.

A prefix cache owns pages that no running request owns. All of its sizes count pages, and all of
its keys are whole pages: a prefix is known only up to a multiple of the page size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from pydantic import BaseModel


class CacheHandle(ABC):
    """A place in a prefix cache up to which tokens are known; opaque to everyone else.

    Attributes:
        cached_len: Tokens of the prefix, a multiple of the page size.
    """

    cached_len: int


class MatchResult(NamedTuple):
    """The longest known prefix of some tokens.

    Attributes:
        handle: Where it ends; pass it to `PrefixCache.lock` before the next call that evicts.
        pages: ``[cached_len / page_size]`` int32 pages in token order; a copy.
    """

    handle: CacheHandle
    pages: np.ndarray


class InsertResult(NamedTuple):
    """What became of pages that were offered.

    Of the offered pages the cache took exactly ``[num_known_pages : len(pages)]``, and all others
    are as they were before: see `not_taken`. A cache that takes nothing says so by
    ``cached_len == 0`` and no pages.

    Attributes:
        handle: Where the known prefix now ends; unlocked.
        pages: ``[handle.cached_len / page_size]`` int32 pages that now hold that prefix; a copy.
            The first ``num_known_pages`` are those that the cache had before, the rest are the
            offered ones.
        num_known_pages: Leading pages whose tokens the cache already knew.
    """

    handle: CacheHandle
    pages: np.ndarray
    num_known_pages: int

    def not_taken(self, offered: np.ndarray) -> np.ndarray:
        """Return the offered pages that are still the caller's, to keep or to free.

        They are the duplicates, where the cache already had another page for the same tokens, and
        the tail that the cache did not take. Pages that the caller had from the cache in the
        first place are the cache's and not among them.

        Args:
            offered: ``[n]`` int32, the pages that were offered.

        Returns:
            ``[m]`` int32 in token order; a copy.
        """
        known = self.num_known_pages
        head = offered[:known]
        is_duplicate = head != self.pages[:known]
        return np.concatenate((head[is_duplicate], offered[len(self.pages) :]))


class CacheSizes(NamedTuple):
    """Pages that a cache owns.

    Attributes:
        evictable: Pages that `PrefixCache.evict` could give back now.
        protected: Pages under a lock.
    """

    evictable: int
    protected: int


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """What a prefix cache is built with.

    Attributes:
        page_size: Tokens of a page.
        settings: The backend's own settings section, or ``None``.
    """

    page_size: int
    settings: BaseModel | None = None


class PrefixCache(ABC):
    """Remembers pages by the tokens whose KV they hold.

    ``factory(config: CacheConfig) -> PrefixCache``. Host only and single-threaded. Token arrays are
    int32 and stay the caller's: a cache copies what it keeps.
    """

    @abstractmethod
    def match_prefix(self, token_ids: np.ndarray) -> MatchResult:
        """Find the longest known prefix of ``token_ids`` and mark it as just used."""

    @abstractmethod
    def lock(self, handle: CacheHandle) -> None:
        """Keep the whole prefix of ``handle`` from eviction; locks nest.

        Raises:
            IntegrityError: The prefix was evicted since the handle was made.
        """

    @abstractmethod
    def unlock(self, handle: CacheHandle) -> None:
        """Take one lock of ``handle`` back.

        A handle stays good while it is locked, whatever is inserted or split meanwhile.

        Raises:
            IntegrityError: The handle is not locked.
        """

    @abstractmethod
    def insert_prefix(self, token_ids: np.ndarray, pages: np.ndarray) -> InsertResult:
        """Offer the pages that hold the KV of ``token_ids``.

        Args:
            token_ids: ``[n]`` int32, ``n`` a multiple of the page size.
            pages: ``[n / page_size]`` int32.

        Returns:
            Which pages now hold the prefix, and so which of the offered ones the cache owns from
            now on. What it knows is marked as just used.
        """

    @abstractmethod
    def evict(self, num_pages: int) -> np.ndarray:
        """Give up unlocked pages, the least recently used first.

        A prefix never goes before what continues it.

        Args:
            num_pages: How many at least.

        Returns:
            ``[m]`` int32 pages that the cache no longer owns, ``m >= num_pages``; ``m`` may be
            larger where pages are only known together.

        Raises:
            CapacityError: Fewer than ``num_pages`` are evictable. Nothing was changed.
        """

    @abstractmethod
    def sizes(self) -> CacheSizes:
        """Count the pages that the cache owns, in constant time."""

    @abstractmethod
    def check_integrity(self) -> np.ndarray:
        """Walk everything and compare it with the counters.

        Returns:
            Every page that the cache owns, int32, in no order.

        Raises:
            AssertionError: A counter, a lock or a page is wrong; the message says which. The
                core's own caches raise `IntegrityError`, which is one.
        """
