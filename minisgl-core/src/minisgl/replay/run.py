"""Running a trace again, tick by tick."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from minisgl.engine.contract import StepEngine
from minisgl.message.types import AbortMsg, FlushMsg, ReplyMsg, SchedulerMsg
from minisgl.replay.compare import Report, compare
from minisgl.replay.engine import ScriptedEngine
from minisgl.replay.requests import Script, Scripts
from minisgl.scheduler.io import SchedulerIO
from minisgl.scheduler.record import Tap
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.trace import (
    Abort,
    Arrival,
    Decision,
    Ending,
    Event,
    Fault,
    Flush,
    Restart,
    Trace,
    written_out,
)

BuildScheduler = Callable[[StepEngine, SchedulerIO], Scheduler]
"""Makes a scheduler with empty books, of the backends that are being tried."""

_SHUT_DOWN = "the engine is shutting down"


class ReplayIO(SchedulerIO):
    """Brings each recorded message at its tick."""

    def __init__(self, trace: Trace, scripts: Scripts, engine: ScriptedEngine) -> None:
        """Queue all messages; ``clock`` has to be set before the first is received."""
        self.clock: Callable[[], int] = lambda: 0
        self._engine = engine
        self._scripts = scripts
        todo = iter(scripts.all)
        self._queue: deque[tuple[int, SchedulerMsg, Script | None]] = deque()
        for event in trace.events:
            match event:
                case Arrival():
                    script = next(todo)
                    self._queue.append((event.tick, scripts.message(script), script))
                case Abort():
                    self._queue.append((event.tick, AbortMsg(event.uid, event.reason), None))
                case Flush():
                    self._queue.append((event.tick, FlushMsg(), None))

    @property
    def next_tick(self) -> int | None:
        """When the next message comes, or ``None``."""
        return self._queue[0][0] if self._queue else None

    def is_due(self, tick: int) -> bool:
        """Whether there is a message at a tick."""
        return self.next_tick is not None and self.next_tick <= tick

    def receive(self, block: bool) -> list[SchedulerMsg]:
        """Return what is due; never blocks."""
        messages: list[SchedulerMsg] = []
        while self.is_due(self.clock()):
            _, message, script = self._queue.popleft()
            if script is not None:
                self._engine.expect(script)
            messages.append(message)
        return messages

    def send(self, replies: list[ReplyMsg]) -> None:
        """Drop replies: the tap has seen them."""


class Replay:
    """One run of a trace on an engine and a scheduler of the caller's choice."""

    def __init__(
        self, trace: Trace, engine: StepEngine, build: BuildScheduler, *, has_model: bool = True
    ) -> None:
        """Prepare.

        Args:
            trace: What to run.
            engine: Computes; its tokens are replaced by those of the trace where these are known.
            build: Makes the scheduler.
            has_model: Whether the engine computes, so that its tokens can be compared with
                recorded ones.
        """
        self._trace = trace
        self._has_tokens = has_model and trace.header.has_prompts
        self._build = build
        self._events: list[Event] = []
        self._tap = Tap(self._note)
        self._engine = ScriptedEngine(engine, lambda: self._tap.tick)
        self._io = ReplayIO(trace, Scripts(trace, engine.limits.vocab_size), self._engine)
        self._io.clock = lambda: self._tap.tick
        self._restarts = deque(e.tick for e in trace.events if isinstance(e, Restart))

    def run(self) -> Report:
        """Run to the end and compare."""
        scheduler = self._start()
        end_tick = self._end_tick()
        while True:
            if self._restarts and self._tap.tick >= self._restarts[0]:
                scheduler = self._restart()
            elif scheduler.has_work or self._io.is_due(self._tap.tick + 1):
                if end_tick is not None and self._tap.tick >= end_tick:
                    break
                scheduler.step()
            elif not self._skip():
                break
        if self._trace.is_complete:
            scheduler.shutdown()
        return compare(
            self._comparable(self._trace.events),
            self._comparable(self._events),
            self._engine.differences if self._has_tokens else (),
            is_complete=self._trace.is_complete,
            has_tokens=self._has_tokens,
        )

    def _start(self) -> Scheduler:
        return self._build(*self._tap.attach(self._engine, self._io))

    def _restart(self) -> Scheduler:
        """Throw the books away where the recorded scheduler did."""
        self._restarts.popleft()
        self._tap.restart()
        return self._start()

    def _skip(self) -> bool:
        """Move the clock on to where something happens again; returns whether anything does."""
        next_message = self._io.next_tick
        due = [] if next_message is None else [next_message - 1]  # asking for it is a tick
        due += list(self._restarts)[:1]
        if due:
            self._tap.tick = max(self._tap.tick, min(due))
        return bool(due)

    def _end_tick(self) -> int | None:
        """Return when to stop although there is work: where the recording did."""
        endings = [event for event in self._trace.events if isinstance(event, Ending)]
        is_cut = not self._trace.is_complete or any(e.detail == _SHUT_DOWN for e in endings)
        return self._trace.last_tick if is_cut else None

    def _note(self, event: Event) -> None:
        self._events.append(event)

    def _comparable(self, events: list[Event]) -> list[Event]:
        """Leave out what a step that was interrupted did: how far it got is chance."""
        torn = {event.tick for event in self._trace.events if isinstance(event, Restart)}
        return [
            event
            for event in written_out(events)
            if not (isinstance(event, Decision | Fault | Ending) and event.tick in torn)
        ]
