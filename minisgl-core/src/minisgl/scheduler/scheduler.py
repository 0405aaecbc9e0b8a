"""The scheduler: decides what each step computes and what becomes of its results."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from minisgl.engine.contract import StepEngine
from minisgl.engine.origin import ErrorOrigin
from minisgl.kvcache.contract import PrefixCache
from minisgl.message.types import (
    AbortMsg,
    ExitMsg,
    FinishReason,
    FlushMsg,
    FlushReply,
    SchedulerMsg,
    SchedulerStats,
    StatsMsg,
    StatsReply,
    UserMsg,
)
from minisgl.plugin.records import StepRecord
from minisgl.scheduler.cache_manager import CacheManager
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.contract import Policy
from minisgl.scheduler.decode import DecodeManager
from minisgl.scheduler.io import SchedulerIO
from minisgl.scheduler.lifecycle import Lifecycle, describe
from minisgl.scheduler.outbox import Outbox
from minisgl.scheduler.prefill import PrefillManager
from minisgl.scheduler.runner import RunnerParts, StepRunner
from minisgl.scheduler.step_plan import StepPlan, plan_decode, plan_prefill
from minisgl.scheduler.table import TableManager

logger = logging.getLogger(__name__)

_CHECK_SHARE = 1000  # an idle check may take one part in so many of the time between checks


class Scheduler:
    """Runs requests on an engine; single-threaded, and the same on every rank.

    Drive it with `run_forever`, or with `step` as long as `has_work`. Each step launches the
    next batch and then, under overlap, settles the one before, so the host prepares while the
    device computes. That a request ends by length is known ahead; that it ended by a token is
    seen one step late, and the token sampled meanwhile is dropped.
    """

    def __init__(
        self,
        engine: StepEngine,
        cache: PrefixCache,
        policy: Policy,
        io: SchedulerIO,
        config: SchedulerConfig | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
        origin: ErrorOrigin | None = None,
    ) -> None:
        """Put the parts together.

        Args:
            engine: Computes steps.
            cache: Prefix cache, empty.
            policy: Orders the queue.
            io: Brings requests and takes results.
            config: How to schedule; ``None`` for the defaults.
            on_step: Told about each step after its result; ``None`` costs nothing.
            origin: Names the backend that raises; ``None`` names none.
        """
        config = SchedulerConfig() if config is None else config
        limits = engine.limits
        self._config = config
        self._io = io
        self._origin = ErrorOrigin() if origin is None else origin
        self._num_pages = limits.num_pages
        self._policy = policy
        self._table = TableManager(limits.max_running_reqs)
        self._cache = CacheManager(cache, limits)
        self._prefill = PrefillManager(config, policy, self._cache, self._table, limits.vocab_size)
        self._decode = DecodeManager()
        self._outbox = Outbox(io)
        self._lifecycle = Lifecycle(
            limits, config, self._prefill, self._decode, self._cache, self._table, self._outbox
        )
        self._runner = StepRunner(
            RunnerParts(
                engine,
                config,
                self._prefill,
                self._decode,
                self._cache,
                self._lifecycle,
                self._outbox,
                on_step,
            )
        )
        self._num_prefills_in_row = 0
        self._inbox: deque[SchedulerMsg] = deque()
        self._is_in_step = False
        self._is_exiting = False
        self._is_checked = True  # since the last step
        self._next_check_s = 0.0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything without a new message."""
        return (
            self._runner.is_in_flight
            or bool(self._decode.reqs)
            or self._prefill.num_waiting > 0
            or self._prefill.partial is not None
        )

    @property
    def open_uids(self) -> list[int]:
        """The uid of every request without a terminal result, in order of arrival."""
        return [req.uid for req in self._lifecycle.active]

    def run_forever(self) -> None:
        """Serve until an `ExitMsg` comes, or an error; then no request is without its result."""
        try:
            while not self._is_exiting:
                self.step(can_block=True)
        except Exception as error:
            self._end_all("error", describe(error))
            raise
        finally:
            self.shutdown()

    def step(self, can_block: bool = False) -> None:
        """Take messages in, launch one step, settle one, and send what became known.

        When an exception or an interrupt leaves it half done, the books are no longer to be
        trusted: the next call begins with `abort_all`, so that the scheduler stays usable.

        Args:
            can_block: Sleep until a message comes when there is nothing to do.
        """
        if self._is_in_step:
            self.abort_all("a step was interrupted")
        self._is_in_step = True
        with self._origin:
            self._step(can_block)
        self._is_in_step = False

    def _step(self, can_block: bool) -> None:
        is_idle = not self.has_work
        if is_idle:
            self._check_when_idle()  # what was put off
        self._inbox.extend(self._io.receive(block=can_block and is_idle and not self._inbox))
        while self._inbox:
            self._handle(self._inbox.popleft())
        if self.has_work:
            self._is_checked = False
            self._runner.run(self._plan())
            if self._config.is_checked_every_step:
                self.check_integrity()
        self._outbox.send()
        if not self.has_work:
            self._check_when_idle()  # now, so that the next request need not wait for it

    def abort_all(self, reason: str) -> None:
        """End every request now, also after an exception or interrupt left `step` half done.

        Nothing of a half-done step is used, and no cached prefix is kept.

        Args:
            reason: For their terminal results.
        """
        self._end_all("abort", reason)

    def _end_all(self, reason: FinishReason, detail: str) -> None:
        self._runner.abandon()
        self._lifecycle.end_running(self._runner.num_launched, reason, detail)
        for req in self._lifecycle.active:
            self._lifecycle.finish(req, reason, detail)
        self._outbox.send()
        self._is_checked = self._is_in_step = False

    def shutdown(self) -> None:
        """Leave no request without a terminal result."""
        self._is_exiting = True
        self.abort_all("the engine is shutting down")

    def stats(self) -> SchedulerStats:
        """Return gauges and counters of this moment."""
        runner, lifecycle = self._runner, self._lifecycle
        num_free = self._cache.num_free
        return SchedulerStats(
            num_waiting=self._prefill.num_waiting,
            num_running=self._table.num_used,
            num_pages=self._num_pages,
            num_free_pages=num_free,
            num_evictable_pages=self._cache.num_available - num_free,
            num_prefill_steps=runner.num_prefill_steps,
            num_decode_steps=runner.num_launched - runner.num_prefill_steps,
            num_prefill_tokens=runner.num_prefill_tokens,
            num_cached_tokens=self._prefill.num_cached_tokens,
            num_output_tokens=runner.num_output_tokens,
            num_discarded_tokens=runner.num_discarded_tokens,
            num_retractions=lifecycle.num_retractions,
            num_finished=dict(lifecycle.num_finished),
        )

    def check_integrity(self) -> None:
        """Walk all books and compare them.

        Raises:
            IntegrityError: A page or a row is lost or has two owners, or the cache disagrees with
                itself; the message says which.
        """
        self._table.check_integrity()
        self._cache.check_integrity(self._table.owners)

    def _handle(self, message: SchedulerMsg) -> None:
        """Act on one message."""
        match message:
            case UserMsg():
                self._lifecycle.accept(message)
            case AbortMsg():
                req = self._lifecycle.find(message.uid)
                if req is not None:
                    self._lifecycle.finish(req, "abort", message.reason)
            case FlushMsg():
                sizes = self._cache.flush()
                self._prefill.wake()
                self._outbox.add(FlushReply(sizes.evictable, sizes.protected))
            case StatsMsg():
                self._outbox.add(StatsReply(self.stats()))
            case ExitMsg():
                self._is_exiting = True

    def _plan(self) -> StepPlan | None:
        """Choose the next step: prefill first, but so many in a row at most while others decode."""
        can_decode = bool(self._decode.reqs)
        if not can_decode:
            self._num_prefills_in_row = 0
        if self._num_prefills_in_row < self._config.max_prefill_steps:
            chunks = self._prefill.plan(self._decode)
            if chunks:
                self._num_prefills_in_row += 1
                return plan_prefill(chunks, self._cache)
        self._num_prefills_in_row = 0
        return self._plan_decode() if can_decode else None

    def _plan_decode(self) -> StepPlan | None:
        """Plan a token for each running request, retracting some when memory is short."""
        decode, cache = self._decode, self._cache
        is_reserved = self._config.admission == "reserve"
        while reqs := decode.reqs:
            if is_reserved or cache.grow(reqs, decode.rows, decode.lens):
                if self._prefill.headroom.on_decode():
                    self._prefill.wake()
                return plan_decode(decode, cache)
            if self._runner.is_in_flight:
                # Its result may end requests, and until it is known nobody can be retracted.
                self._runner.drain()
                continue
            self._retract_one()
        return None

    def _retract_one(self) -> None:
        """Send the last in rank back to the queue."""
        running = list(self._decode.reqs)
        if self._prefill.partial is not None:
            running.append(self._prefill.partial)
        assert len(running) > 1, f"{running[0]} does not fit into the pool alone"
        req = max(running, key=self._policy.rank)
        self._lifecycle.retract(req)
        self._prefill.headroom.on_retraction(req.max_device_len)

    def _check_when_idle(self) -> None:
        """Check integrity once per idle phase, unless checks would take too much of the time."""
        start_s = time.monotonic()
        if self._is_checked or start_s < self._next_check_s:
            return
        self.check_integrity()
        self._is_checked = True
        done_s = time.monotonic()
        self._next_check_s = done_s + _CHECK_SHARE * (done_s - start_s)
