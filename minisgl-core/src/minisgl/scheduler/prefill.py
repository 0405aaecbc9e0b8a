"""The waiting requests: who starts next, and how much of each prompt the next step computes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import chain, islice

from minisgl.scheduler.admission import Admission, Chunk, Room
from minisgl.scheduler.cache_manager import CacheManager
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.contract import Policy, ScheduledReq
from minisgl.scheduler.decode import DecodeManager
from minisgl.scheduler.headroom import Headroom
from minisgl.scheduler.table import TableManager

_MAX_LOOKED_AT = 256  # waiting requests per step
_MAX_MISFITS = 8  # of them that may turn out not to fit
_MAX_WATCHED = 128  # oldest waiting requests that are watched for being overtaken
_MAX_SCORED_LOGITS = 1 << 26  # of a step, for log-probabilities of prompts: 256 MiB in float32
_PART_OF_OTHERS = 4  # one part in so many of a step is left to others beside a long prompt


class PrefillManager:
    """The queue, and at most one request whose prompt is half computed.

    A request gets the pages of its whole prompt when it starts, so a chunk never runs out of
    memory. While a long prompt is computed in chunks, shorter ones that fit into the rest of a
    step whole may go along, but no second one is cut.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        policy: Policy,
        cache: CacheManager,
        table: TableManager,
        vocab_size: int,
    ) -> None:
        """Make an empty queue."""
        self.partial: ScheduledReq | None = None
        self.headroom = Headroom(config.headroom_tokens)
        self.num_cached_tokens = 0
        self._config = config
        self._policy = policy
        self._cache = cache
        self._table = table
        self._max_scored = max(1, _MAX_SCORED_LOGITS // vocab_size)
        self._waiting: OrderedDict[int, ScheduledReq] = OrderedDict()
        self._is_worth_trying = True

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, without the half-computed one."""
        return len(self._waiting)

    @property
    def waiting(self) -> list[ScheduledReq]:
        """The queue, front first; a copy."""
        return list(self._waiting.values())

    def add(self, req: ScheduledReq) -> None:
        """Put a new request at the end of the queue."""
        self._waiting[req.uid] = req
        self._is_worth_trying = True

    def put_back(self, req: ScheduledReq) -> None:
        """Put a retracted request at the front of the queue."""
        self._waiting[req.uid] = req
        self._waiting.move_to_end(req.uid, last=False)
        self._is_worth_trying = True

    def discard(self, req: ScheduledReq) -> None:
        """Forget a request, waiting or half computed."""
        self._waiting.pop(req.uid, None)
        if self.partial is req:
            self.partial = None
        self._is_worth_trying = True

    def wake(self) -> None:
        """Try again although nothing fitted the last time: there may be more room now."""
        self._is_worth_trying = True

    def plan(self, decode: DecodeManager) -> list[Chunk]:
        """Choose what a prefill step computes, and start requests for it.

        Args:
            decode: The running requests, which must keep some room to grow.

        Returns:
            Chunks of different requests, ``max_prefill_length`` tokens at most together; empty
            when nothing can be computed now. Whoever started has a row and its pages.
        """
        budget = self._config.max_prefill_length
        can_start = bool(self._waiting) and self._is_worth_trying and self._table.num_free > 0
        first: Chunk | None = None
        if self.partial is not None:
            others = budget // _PART_OF_OTHERS if can_start else 0
            first = self._chunk_of(self.partial, budget - others)
            budget -= first.num_tokens
        started: list[Chunk] = []
        if can_start and budget > 0:
            is_scoring = self.partial is not None and self.partial.is_scoring
            room = Room(
                budget,
                self._spare_pages(decode),
                self.headroom.num_tokens,
                0 if is_scoring else self._max_scored,
            )
            admission = Admission(self._config, self._cache, self._table, first, room)
            self._start_waiting(admission)
            started, budget = admission.started, admission.num_tokens
            self._is_worth_trying = bool(started) or first is not None
        if first is None:
            return started
        return [self._chunk_of(first.req, first.num_tokens + budget), *started]

    def _start_waiting(self, admission: Admission) -> None:
        """Start requests in the order of the policy, except for those that waited too long."""
        num_misfits = 0
        for req in islice(self._candidates(), _MAX_LOOKED_AT):
            if admission.is_over or num_misfits == _MAX_MISFITS:
                break
            verdict = admission.try_start(req)
            if verdict == "started":
                continue
            if req.num_overtaken >= self._config.max_overtakes:
                break  # nobody starts before it any more
            num_misfits += verdict == "no room"
        for chunk in admission.started:
            del self._waiting[chunk.req.uid]
            self.num_cached_tokens += chunk.req.cached_len
        if admission.started:
            self._count_overtaken(max(chunk.req.arrival for chunk in admission.started))

    def _candidates(self) -> Iterable[ScheduledReq]:
        """Order the queue: first who was overtaken too often, then as the policy says."""
        ordered = self._policy.order(self._waiting.values(), self._cache.cache)
        limit = self._config.max_overtakes
        watched = islice(self._waiting.values(), _MAX_WATCHED)
        aged = [req for req in watched if req.num_overtaken >= limit]
        if not aged:
            return ordered
        uids = {req.uid for req in aged}
        return chain(aged, (req for req in ordered if req.uid not in uids))

    def _count_overtaken(self, arrival: int) -> None:
        """Note that a request of that arrival has started."""
        for req in islice(self._waiting.values(), _MAX_WATCHED):
            if req.arrival < arrival:
                req.num_overtaken += 1

    def _spare_pages(self, decode: DecodeManager) -> int:
        """Return how many pages running requests are likely to need soon."""
        if self._config.admission == "reserve":
            return 0
        num_tokens = self.headroom.num_tokens
        num_pages = decode.growth(num_tokens, self._cache.page_size)
        if self.partial is not None:
            req = self.partial
            grown = min(req.num_tokens + num_tokens, req.max_device_len - 1)
            num_pages += self._cache.pages_for(grown) - req.num_pages
        return num_pages

    def _chunk_of(self, req: ScheduledReq, num_tokens: int) -> Chunk:
        """Make a chunk of at most ``num_tokens`` tokens."""
        if req.is_scoring:
            num_tokens = min(num_tokens, self._max_scored)
        return Chunk(req, min(num_tokens, req.num_tokens - req.cached_len))
