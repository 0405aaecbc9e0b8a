"""A prefix cache under supervision: every call is compared with a plain dictionary of prefixes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from minisgl.errors import CapacityError
from minisgl.kvcache.contract import CacheHandle, InsertResult, PrefixCache
from minisgl.kvcache.pages import PageAllocator

_TOKEN_BYTES = 4


class Known(NamedTuple):
    """A prefix that the cache said it knows.

    Attributes:
        handle: The cache's handle.
        key: Bytes of the prefix's tokens.
        pages: ``[num_pages]`` int32.
    """

    handle: CacheHandle
    key: bytes
    pages: np.ndarray


class CheckedCache:
    """Drives a cache, and fails with a sentence from the contract when it strays from the model.

    The model is ``{tokens of a prefix: its last page}``; what a cache took and did not give up it
    has to find. Pages come from an allocator with a small pool, so that they are reused soon and
    a stale one is noticed.

    Attributes:
        cache: The cache itself.
        page_size: Tokens of a page.
        allocator: Pages that neither the cache nor the caller owns.
    """

    def __init__(self, cache: PrefixCache, page_size: int, num_pages: int = 64) -> None:
        """Supervise an empty cache.

        Args:
            cache: The cache.
            page_size: What it was built with.
            num_pages: Pages of the pool.
        """
        self.cache = cache
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages)
        self._page_bytes = page_size * _TOKEN_BYTES
        self._page_of: dict[bytes, int] = {}
        self._locked: list[Known] = []

    @property
    def num_owned(self) -> int:
        """Pages that the cache took and did not give up."""
        return len(self._page_of)

    @property
    def locked(self) -> tuple[Known, ...]:
        """The locks that are held, one entry each."""
        return tuple(self._locked)

    def owns(self, token_ids: np.ndarray) -> bool:
        """Say whether the model knows these whole pages, without using them in the cache."""
        return token_ids.tobytes() in self._page_of

    def match(self, token_ids: np.ndarray) -> Known:
        """Match, and compare what is found."""
        key = token_ids.astype(np.int32).tobytes()
        handle, pages = self.cache.match_prefix(token_ids)
        expected = self._longest(key)
        self._check_result(handle, pages)
        assert len(pages) == len(expected), (
            "match_prefix finds the longest known prefix in whole pages: "
            f"it found {len(pages)} pages, {len(expected)} are known"
        )
        assert pages.tolist() == expected, (
            "match_prefix returns the pages that were inserted for these tokens, in order"
        )
        self.check()
        return Known(handle, key[: len(pages) * self._page_bytes], pages)

    def insert(self, token_ids: np.ndarray) -> Known:
        """Offer fresh pages for whole pages of tokens; those not taken are freed."""
        offered = self.allocator.allocate(len(token_ids) // self.page_size)
        known, _ = self.offer(token_ids, offered)
        return known

    def offer(self, token_ids: np.ndarray, offered: np.ndarray) -> tuple[Known, InsertResult]:
        """Insert, compare what the cache took, and free the rest.

        Args:
            token_ids: ``[n]`` int32.
            offered: ``[n / page_size]`` int32 pages of the caller's.
        """
        key = token_ids.tobytes()
        before = self._longest(key)
        given = offered.copy()
        result = self.cache.insert_prefix(token_ids, offered)
        self._check_result(result.handle, result.pages)
        self._check_taken(result, before, given)
        for index, page in enumerate(result.pages.tolist()):
            self._page_of[key[: (index + 1) * self._page_bytes]] = page
        self.allocator.free(result.not_taken(given))
        self.check()
        known_key = key[: len(result.pages) * self._page_bytes]
        return Known(result.handle, known_key, result.pages), result

    def lock(self, known: Known) -> None:
        """Lock a prefix that has just been matched or inserted."""
        self.cache.lock(known.handle)
        self._locked.append(known)
        self.check()

    def unlock(self, known: Known) -> None:
        """Take back one lock."""
        index = next(i for i, held in enumerate(self._locked) if held.handle is known.handle)
        del self._locked[index]
        self.cache.unlock(known.handle)
        self.check()

    def evict(self, num_pages: int) -> set[int]:
        """Evict, or see that too much is refused; what is given up is freed.

        Returns:
            The pages that the cache gave up.
        """
        protected = self._protected_pages()
        num_evictable = len(self._page_of) - len(protected)
        if num_pages > num_evictable:
            self._check_refusal(num_pages, num_evictable)
            return set()
        pages = self.cache.evict(num_pages)
        given_up = set(pages.tolist())
        _check_page_array(pages, "evict")
        assert len(given_up) == len(pages), "evict gives up each page once"
        assert len(pages) >= num_pages, (
            f"evict gives up at least what was asked for: {num_pages} pages, it gave {len(pages)}"
        )
        assert given_up <= set(self._page_of.values()), "evict gives up pages that the cache owns"
        assert not given_up & protected, "evict never gives up a page of a locked prefix"
        self._page_of = {k: page for k, page in self._page_of.items() if page not in given_up}
        self.allocator.free(pages)
        self.check()
        return given_up

    def evict_all(self) -> set[int]:
        """Evict everything that is not locked."""
        return self.evict(self.num_owned - len(self._protected_pages()))

    def check(self) -> None:
        """Compare the cache's books with the model's."""
        pages = self.cache.check_integrity()
        assert sorted(pages.tolist()) == sorted(self._page_of.values()), (
            "check_integrity returns every page that the cache owns, each once: it took "
            f"{sorted(self._page_of.values())} and reports {sorted(pages.tolist())}"
        )
        for key in self._page_of:
            parent = key[: -self._page_bytes]
            assert not parent or parent in self._page_of, (
                "a prefix never goes before what continues it"
            )
        num_protected = len(self._protected_pages())
        expected = (len(self._page_of) - num_protected, num_protected)
        sizes = self.cache.sizes()
        assert tuple(sizes) == expected, (
            "sizes() counts the pages under a lock as protected and all others as evictable: "
            f"(evictable, protected) is {expected}, it says {tuple(sizes)}"
        )
        num_free = self.allocator.num_free
        assert num_free + len(self._page_of) == self.allocator.num_pages, (
            "every page is either free or in the cache"
        )

    def close(self) -> None:
        """Release everything: nothing may be left behind."""
        for known in tuple(self._locked):
            self.unlock(known)
        self.evict_all()
        assert self.num_owned == 0, "what is not locked can be evicted"

    def _longest(self, key: bytes) -> list[int]:
        """Return the pages of the longest prefix that the model knows."""
        pages: list[int] = []
        for end in range(self._page_bytes, len(key) + 1, self._page_bytes):
            if key[:end] not in self._page_of:
                break
            pages.append(self._page_of[key[:end]])
        return pages

    def _protected_pages(self) -> set[int]:
        """Return the pages of all locked prefixes."""
        protected: set[int] = set()
        for known in self._locked:
            protected.update(self._longest(known.key))
        return protected

    def _check_result(self, handle: CacheHandle, pages: np.ndarray) -> None:
        _check_page_array(pages, "a result")
        assert handle.cached_len == len(pages) * self.page_size, (
            "handle.cached_len is the tokens of the returned pages: "
            f"{len(pages)} pages of {self.page_size} tokens, it says {handle.cached_len}"
        )

    def _check_taken(self, result: InsertResult, before: list[int], given: np.ndarray) -> None:
        """Compare an insertion with what was known before it."""
        num_known = result.num_known_pages
        assert num_known == len(before), (
            f"num_known_pages counts the leading pages whose tokens were known: {len(before)}, "
            f"it says {num_known}"
        )
        assert num_known <= len(result.pages) <= len(given), (
            "insert_prefix returns the known pages and those it took of the offered ones"
        )
        assert result.pages[:num_known].tolist() == before[:num_known], (
            "what was known keeps its pages; the offered duplicates stay the caller's"
        )
        taken = slice(num_known, len(result.pages))
        assert result.pages[taken].tolist() == given[taken].tolist(), (
            "behind what was known, the prefix is held by the offered pages in order"
        )

    def _check_refusal(self, num_pages: int, num_evictable: int) -> None:
        try:
            self.cache.evict(num_pages)
        except CapacityError:
            self.check()
        else:
            raise AssertionError(
                f"evict raises CapacityError for {num_pages} pages when {num_evictable} are "
                "evictable"
            )


def _check_page_array(pages: np.ndarray, name: str) -> None:
    assert isinstance(pages, np.ndarray), f"{name} has pages as a numpy array"
    assert (pages.dtype, pages.ndim) == (np.dtype(np.int32), 1), (
        f"{name} has pages as a one-dimensional int32 array"
    )
