"""What the offline interface drives: all ranks of an engine, as if they were one scheduler."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from minisgl.engine.build import EngineRequest, build_engine
from minisgl.engine.contract import EngineLimits, StepEngine
from minisgl.message.types import SchedulerStats
from minisgl.plugin.records import StepRecord
from minisgl.scheduler.build import SchedulerBackends, build_scheduler
from minisgl.scheduler.io import OfflineIO, SchedulerIO
from minisgl.scheduler.recorder import Recorder
from minisgl.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class RankRequest:
    """What ranks are built for.

    Attributes:
        engine: What the engine is built for; its rank and rendezvous are those of rank 0.
        backends: For the scheduler.
        line: Where requests come from and results go.
        around: Puts observers around the line.
        on_step: Observes steps; ``None`` costs nothing.
        recorder: Writes a trace; ``None`` costs nothing.
    """

    engine: EngineRequest
    backends: SchedulerBackends
    line: OfflineIO
    around: Callable[[OfflineIO], SchedulerIO]
    on_step: Callable[[StepRecord], None] | None = None
    recorder: Recorder | None = None

    def build_scheduler(self, engine: StepEngine, io: SchedulerIO) -> Scheduler:
        """Build a scheduler with empty books."""
        if self.recorder is not None:
            engine, io = self.recorder.attach(engine, io, self.backends.names())
        return build_scheduler(self.backends, self.engine.settings, engine, io, self.on_step)

    def end_recording(self) -> None:
        """Close the trace in order, after the scheduler was shut down."""
        if self.recorder is not None:
            self.recorder.close()


class Ranks(ABC):
    """The ranks of one engine.

    Attributes:
        limits: Sizes of the engine.
        lock: Reentrant; whoever calls anything here holds it.
    """

    limits: EngineLimits
    lock: AbstractContextManager[object]

    @property
    @abstractmethod
    def failure(self) -> str:
        """Why there will never be another step, or nothing."""

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Whether a step would do anything without a new message."""

    @abstractmethod
    def step(self) -> None:
        """Let every rank do one step; see `Scheduler.step`.

        Raises:
            WorkerError: A rank is gone. So are the others then, and `failure` is set.
        """

    @abstractmethod
    def restart(self) -> None:
        """End every request, and forget what is on the line, after a step was left half done."""

    @abstractmethod
    def stats(self) -> SchedulerStats:
        """Return gauges and counters of this moment."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Compare all books; see `Scheduler.check_integrity`."""

    @abstractmethod
    def shutdown(self) -> None:
        """Give every request its terminal result and let go of everything; safe to call twice."""


class LocalRank(Ranks):
    """The only rank, in this process and in the thread of the caller."""

    def __init__(self, request: RankRequest) -> None:
        """Build engine and scheduler; see `build_engine` for the errors."""
        self.lock = threading.RLock()
        self._request = request
        self._engine = build_engine(request.engine)
        self._scheduler = self._build()
        self.limits = self._engine.limits

    @property
    def failure(self) -> str:
        """Nothing: after any error, a restart will do."""
        return ""

    @property
    def has_work(self) -> bool:
        """See `Ranks.has_work`."""
        return self._scheduler.has_work

    def step(self) -> None:
        """Do one step."""
        self._scheduler.step()

    def restart(self) -> None:
        """Start over with new books; those of a half-done step cannot be trusted."""
        line = self._request.line
        line.receive(block=False)
        self._scheduler = self._build()
        line.take()

    def stats(self) -> SchedulerStats:
        """See `Scheduler.stats`; counters begin anew with each restart."""
        return self._scheduler.stats()

    def check_integrity(self) -> None:
        """See `Scheduler.check_integrity`."""
        self._scheduler.check_integrity()

    def shutdown(self) -> None:
        """See `Ranks.shutdown`."""
        self._scheduler.shutdown()
        self._request.end_recording()
        self._engine.shutdown()

    def _build(self) -> Scheduler:
        request = self._request
        return request.build_scheduler(self._engine, request.around(request.line))
