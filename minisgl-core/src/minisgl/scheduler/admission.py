"""One attempt to start waiting requests: what is left of the step's budget and of the memory."""

from __future__ import annotations

from typing import Literal, NamedTuple

from minisgl.scheduler.cache_manager import CacheManager
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.contract import ScheduledReq
from minisgl.scheduler.table import TableManager

Verdict = Literal["started", "no room", "shares soon"]
"""What became of a request that should start."""


class Chunk(NamedTuple):
    """Tokens of one request that the next step computes.

    Attributes:
        req: Has its row and pages.
        num_tokens: How many from ``req.cached_len`` on, at least 1.
    """

    req: ScheduledReq
    num_tokens: int

    @property
    def is_last(self) -> bool:
        """Whether the prompt is complete after it, so that it samples."""
        return self.req.cached_len + self.num_tokens == self.req.num_tokens


class Room(NamedTuple):
    """What running requests leave.

    Attributes:
        num_tokens: Prompt tokens that the step can still compute.
        num_spare_pages: Pages that have to stay available, for running requests to grow.
        num_growth_tokens: Tokens by which a request should be able to grow once it has started.
        num_scored: Tokens whose logits the step can still keep, for log-probabilities of prompts.
    """

    num_tokens: int
    num_spare_pages: int
    num_growth_tokens: int
    num_scored: int


class Admission:
    """Starts requests for one step, one by one, as long as they fit."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        table: TableManager,
        partial: Chunk | None,
        room: Room,
    ) -> None:
        """Begin.

        Args:
            config: Says what is reserved, and when sharing is worth a wait.
            cache: Gives the pages.
            table: Gives the rows.
            partial: The chunk of a half-computed prompt that the step already has.
            room: What is left beside it.
        """
        self.started: list[Chunk] = []
        self.num_tokens = room.num_tokens
        self._num_scored = room.num_scored
        self._room = room
        self._num_spare_pages = room.num_spare_pages
        self._cache = cache
        self._table = table
        self._is_reserving = config.admission == "reserve"
        # A prefix is shared in whole pages, so less than a page is no saving.
        self._shared_len = cache.pages_for(config.min_shared_tokens) * cache.page_size
        self._is_cut = partial is not None and not partial.is_last
        self._computing: set[tuple[int, bytes]] = set()
        if partial is not None:
            req = partial.req
            self._expect_prefix(req, req.num_cached_pages * cache.page_size)

    @property
    def is_over(self) -> bool:
        """Whether no request can start any more."""
        return self.num_tokens == 0 or self._table.num_free == 0

    def try_start(self, req: ScheduledReq) -> Verdict:
        """Start ``req`` if it fits; its chunk is then the last one of ``started``.

        There is no room when it would be the second half-computed prompt or when memory is short.
        It waits as well while the step computes a prefix that it shares: the next step finds that
        in the cache.
        """
        match = self._cache.match(req)
        start = match.handle.cached_len
        num_rest = req.num_tokens - start
        if self._can_share_soon(req, start):
            return "shares soon"
        limit = min(self.num_tokens, self._num_scored) if req.is_scoring else self.num_tokens
        if limit == 0 or (num_rest > limit and self._is_cut):
            return "no room"
        num_pages, num_growth = self._pages_wanted(req)
        self._table.take(req)
        if not self._cache.admit(req, match, num_pages, self._num_spare_pages + num_growth):
            self._table.give_back(req)
            return "no room"
        self._num_spare_pages += num_growth
        if req.num_retractions == 0:
            req.num_cached_prompt_tokens = start
        chunk = Chunk(req, min(num_rest, limit))
        self.started.append(chunk)
        self.num_tokens -= chunk.num_tokens
        if req.is_scoring:
            self._num_scored -= chunk.num_tokens
        self._is_cut = self._is_cut or not chunk.is_last
        self._expect_prefix(req, start)
        return "started"

    def _pages_wanted(self, req: ScheduledReq) -> tuple[int, int]:
        """Return the pages to give to ``req`` now, and those to leave for it to grow into."""
        most = req.max_device_len - 1  # the last sampled token needs no KV
        pages_for = self._cache.pages_for
        if self._is_reserving:
            return pages_for(most), 0
        num_pages = pages_for(req.num_tokens)
        if self._table.num_used == 0:
            return num_pages, 0  # alone, it can have all there is
        grown = min(req.num_tokens + self._room.num_growth_tokens, most)
        return num_pages, pages_for(grown) - num_pages

    def _can_share_soon(self, req: ScheduledReq, start: int) -> bool:
        """Whether this step computes enough tokens that ``req`` needs from ``start`` on."""
        if not self._computing or req.num_tokens - 1 < start + self._shared_len:
            return False
        if req.is_scoring:
            return False  # it computes its prompt itself
        return self._prefix_key(req, start) in self._computing

    def _expect_prefix(self, req: ScheduledReq, start: int) -> None:
        """Note that ``req`` is computing its tokens from ``start`` on, whatever the chunk.

        Two requests that share more than the cache knows have both found the same ``start`` there,
        so it is enough to compare the next few tokens.
        """
        if self._cache.is_sharing and req.num_tokens >= start + self._shared_len:
            self._computing.add(self._prefix_key(req, start))

    def _prefix_key(self, req: ScheduledReq, start: int) -> tuple[int, bytes]:
        return start, req.tokens[start : start + self._shared_len].tobytes()
