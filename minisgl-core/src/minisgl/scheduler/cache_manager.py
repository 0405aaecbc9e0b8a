"""Who owns which page: the free list, the prefix cache, or a request."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from minisgl.engine.contract import EngineLimits
from minisgl.errors import IntegrityError
from minisgl.kvcache.contract import CacheSizes, MatchResult, PrefixCache
from minisgl.kvcache.pages import PageAllocator
from minisgl.scheduler.contract import ScheduledReq


class PageUpdates(NamedTuple):
    """Page-table entries that the engine does not know yet; each place occurs once.

    Attributes:
        rows: ``[n]`` int32.
        cols: ``[n]`` int32.
        ids: ``[n]`` int32 pages.
    """

    rows: np.ndarray
    cols: np.ndarray
    ids: np.ndarray


class CacheManager:
    """Gives pages to requests, shares them through the prefix cache, and takes them back.

    The row of a request holds ``num_pages`` pages: first ``num_cached_pages`` that the cache owns
    and the request has locked, then pages of its own. So at any time the free list, the cache, the
    own pages of requests and the pages in limbo are all pages, each once.

    A page that a launched step may still touch is nobody else's: pages go back when the newest
    step that holds them has been settled. Publishing is the other way round and may come early:
    pages enter the cache as soon as the step that fills them was *launched*, because steps run in
    launch order on one stream, so whoever finds them there reads them in a later step.
    """

    def __init__(self, cache: PrefixCache, limits: EngineLimits) -> None:
        """Make every page free.

        Args:
            cache: The prefix cache, empty.
            limits: Sizes of the engine.
        """
        self.page_size = limits.page_size
        max_pages = self.pages_for(limits.max_seq_len)
        self.page_table = np.zeros((limits.max_running_reqs, max_pages), dtype=np.int32)
        self.cache = cache
        self.is_sharing = True  # until the cache turns out to keep nothing
        self._allocator = PageAllocator(limits.num_pages)
        self._limbo: deque[tuple[int, np.ndarray]] = deque()  # step that holds them, pages
        self._updates: list[PageUpdates] = []
        self._filled: list[tuple[int, int]] = []  # rows that were filled since, and their pages
        self._no_updates = PageUpdates(*(np.empty(0, dtype=np.int32) for _ in range(3)))

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return self._allocator.num_free

    @property
    def num_available(self) -> int:
        """Pages that could be given out now."""
        return self._allocator.num_free + self.cache.sizes().evictable

    def pages_for(self, num_tokens: int) -> int:
        """Return how many pages hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.page_size)

    def match(self, req: ScheduledReq) -> MatchResult:
        """Find the cached prefix of a waiting request; its last token is always left to compute.

        So is whatever has logits that say how likely its prompt is.
        """
        end = req.num_scored if req.is_scoring else req.num_tokens
        return self.cache.match_prefix(req.tokens[: end - 1])

    def admit(self, req: ScheduledReq, match: MatchResult, num_pages: int, num_spare: int) -> bool:
        """Fill the row of ``req`` if there is room.

        Args:
            req: Has a row.
            match: Its cached prefix, just looked up.
            num_pages: Pages that the row shall hold, those of the prefix included.
            num_spare: Pages that must be available beyond.

        Returns:
            Whether it was done. Otherwise nothing was changed.
        """
        # Locked first: the prefix may be all that could be evicted.
        self.cache.lock(match.handle)
        num_cached = len(match.pages)
        num_new = num_pages - num_cached
        if num_new + num_spare > self.num_available:
            self.cache.unlock(match.handle)
            return False
        row = self.page_table[req.table_idx]
        row[:num_cached] = match.pages
        row[num_cached:num_pages] = self._take(num_new)
        req.cache_handle = match.handle
        req.num_pages = num_pages
        req.num_cached_pages = num_cached
        req.cached_len = match.handle.cached_len
        self._filled.append((req.table_idx, num_pages))
        return True

    def grow(self, reqs: list[ScheduledReq], rows: np.ndarray, lens: np.ndarray) -> bool:
        """Give a page to each request whose next token begins one.

        Args:
            reqs: Requests that are about to compute one token each.
            rows: ``[num_reqs]`` int32, their rows.
            lens: ``[num_reqs]`` int32, tokens before that one.

        Returns:
            Whether there was room. Otherwise nothing was changed.
        """
        if self.page_size > 1:
            crossing = np.flatnonzero(lens % self.page_size == 0)
            if len(crossing) == 0:
                return True
            rows, lens = rows[crossing], lens[crossing]
            reqs = [reqs[i] for i in crossing.tolist()]
        if len(reqs) > self.num_available:
            return False
        pages = self._take(len(reqs))
        cols = lens // self.page_size if self.page_size > 1 else lens
        self.page_table[rows, cols] = pages
        for req in reqs:
            req.num_pages += 1
        self._updates.append(PageUpdates(rows, cols, pages))
        return True

    def share(self, req: ScheduledReq, step: int) -> None:
        """Offer the full pages of ``req`` to the cache, once the step that fills them is launched.

        Where the cache has the same tokens already, the row is switched to the cache's pages and
        the duplicates go to limbo: the launched ``step`` still reads and writes them.
        """
        num_full = req.cached_len // self.page_size
        if num_full <= req.num_cached_pages or not self.is_sharing:
            return
        offered = self.page_table[req.table_idx, :num_full].copy()
        result = self.cache.insert_prefix(req.tokens[: num_full * self.page_size], offered)
        num_cached = len(result.pages)
        self.is_sharing = num_cached > 0
        if num_cached <= req.num_cached_pages:
            return
        self.cache.lock(result.handle)
        if req.cache_handle is not None:
            self.cache.unlock(req.cache_handle)
        req.cache_handle = result.handle
        req.num_cached_pages = num_cached
        switched = np.flatnonzero(offered[:num_cached] != result.pages).astype(np.int32)
        if len(switched):
            self._limbo.append((step, offered[switched]))
            pages = result.pages[switched]
            self.page_table[req.table_idx, switched] = pages
            rows = np.full(len(switched), req.table_idx, dtype=np.int32)
            self._updates.append(PageUpdates(rows, switched, pages))

    def release(self, req: ScheduledReq, is_valid: bool = True) -> None:
        """Take all pages of ``req`` back; no launched step may hold them any more.

        Args:
            req: Keeps its row, which the caller takes back.
            is_valid: Whether the KV in them is right, so that the cache may have it.
        """
        pages = self.page_table[req.table_idx, : req.num_pages].copy()
        own = pages[req.num_cached_pages :]
        num_full = req.cached_len // self.page_size
        if is_valid and self.is_sharing and num_full > req.num_cached_pages:
            assert req.cached_len <= req.num_tokens, f"{req}: {req.num_tokens} tokens are known"
            offered = pages[:num_full]
            result = self.cache.insert_prefix(req.tokens[: num_full * self.page_size], offered)
            self.is_sharing = len(result.pages) > 0
            own = np.concatenate((result.not_taken(offered), pages[num_full:]))
        if req.cache_handle is not None:
            self.cache.unlock(req.cache_handle)
            req.cache_handle = None
        self._allocator.free(own)
        if self._updates or self._filled:
            self._forget_updates(req.table_idx)
        req.num_pages = req.num_cached_pages = req.cached_len = 0

    def settle(self, step: int) -> None:
        """Free what was in limbo for ``step`` and the steps before it, which have run."""
        while self._limbo and self._limbo[0][0] <= step:
            self._allocator.free(self._limbo.popleft()[1])

    def flush(self) -> CacheSizes:
        """Forget every cached prefix that is not locked.

        Returns:
            The sizes of the cache as they were before; its evictable pages are now free.
        """
        sizes = self.cache.sizes()
        self._allocator.free(self.cache.evict(sizes.evictable))
        return sizes

    def take_updates(self) -> PageUpdates:
        """Return, once, the page-table entries that changed since the last call."""
        updates, self._updates = self._updates, []
        if self._filled:
            updates.append(self._filled_rows())
            self._filled = []
        if len(updates) == 1:
            return updates[0]
        if not updates:
            return self._no_updates
        return PageUpdates(*(np.concatenate(column) for column in zip(*updates, strict=True)))

    def put_back_updates(self, updates: PageUpdates) -> None:
        """Return updates that did not reach the engine."""
        self._updates.insert(0, updates)

    def check_integrity(self, owners: list[ScheduledReq]) -> None:
        """See that the books of all owners together name each page once.

        Args:
            owners: Every request that holds a row.

        Raises:
            IntegrityError: A page is lost, or has two owners; or a row shows a page as cached that
                the cache does not own.
        """
        self._allocator.check_integrity()
        cached = self.cache.check_integrity()
        own = [self.page_table[r.table_idx, r.num_cached_pages : r.num_pages] for r in owners]
        limbo = [pages for _, pages in self._limbo]
        owned = np.concatenate((self._allocator.free_pages(), cached, *own, *limbo))
        counts = np.bincount(owned, minlength=self._allocator.num_pages)
        wrong = np.flatnonzero(counts != 1)
        if len(wrong):
            page = int(wrong[0])
            raise IntegrityError(
                f"{len(wrong)} pages: page {page} has {counts[page]} owners, not 1"
            )
        is_cached = np.zeros(self._allocator.num_pages, dtype=np.bool_)
        is_cached[cached] = True
        for req in owners:
            shared = self.page_table[req.table_idx, : req.num_cached_pages]
            if not is_cached[shared].all():
                raise IntegrityError(f"{req}: its row shows pages as cached that are not")

    def _take(self, num_pages: int) -> np.ndarray:
        """Take pages from the free list, which eviction fills up; there must be enough."""
        num_missing = num_pages - self._allocator.num_free
        if num_missing > 0:
            self._allocator.free(self.cache.evict(num_missing))
        return self._allocator.allocate(num_pages)

    def _filled_rows(self) -> PageUpdates:
        """Return the entries of all rows that were filled."""
        rows, counts = zip(*self._filled, strict=True)
        cols = np.arange(max(counts), dtype=np.int32)
        return PageUpdates(
            np.repeat(np.array(rows, dtype=np.int32), counts),
            np.concatenate([cols[:count] for count in counts]),
            np.concatenate([self.page_table[row, :count] for row, count in self._filled]),
        )

    def _forget_updates(self, row: int) -> None:
        """Drop entries of a row that changes hands: the engine must not see a place twice."""
        masks = [updates.rows != row for updates in self._updates]
        self._updates = [
            PageUpdates(*(column[mask] for column in updates))
            for updates, mask in zip(self._updates, masks, strict=True)
        ]
        self._filled = [filled for filled in self._filled if filled[0] != row]
