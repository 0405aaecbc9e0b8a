"""A worker process as the one that starts it sees it."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from minisgl import errors
from minisgl.errors import CommError, MinisglError, ProtocolError, WorkerError
from minisgl.message.lifecycle import FailedMsg, ReadyMsg, WorkerReport
from minisgl.message.wire import wire_codec
from minisgl.workers.contract import WorkerSpec
from minisgl.workers.main import run_worker
from minisgl.workers.parent import holding_terminal_signals

_LAST_WORDS_S = 0.5
_WITNESS_S = 0.3  # the first process seen to fail may only have noticed that another one did


class Worker:
    """One worker process and the pipe to it.

    It ends when the *thread* that makes this object does: that is what the kernel calls a parent.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        """Start it."""
        context = multiprocessing.get_context("spawn")
        self.name = spec.name
        self.role = spec.role
        # The parent writes nothing: that this end closes tells the worker that the parent is gone.
        self._connection, theirs = context.Pipe()
        self._process: SpawnProcess = context.Process(
            target=run_worker, args=(spec, theirs), name=f"minisgl {spec.name}", daemon=True
        )
        with holding_terminal_signals():
            self._process.start()
        theirs.close()
        self._codec = wire_codec()
        self._last_report: WorkerReport | None = None

    @property
    def connection(self) -> Connection:
        """Readable when the worker has reported, or is gone."""
        return self._connection

    @property
    def sentinel(self) -> int:
        """Becomes readable when the worker has ended."""
        return self._process.sentinel

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None, "it was started"
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process.is_alive()

    @property
    def exit_code(self) -> int | None:
        """How it ended: minus the number of the signal that killed it; ``None`` while it runs."""
        return self._process.exitcode

    def report(self, timeout_s: float = 0.0) -> WorkerReport | None:
        """Return what the worker says of itself, if anything new."""
        try:
            if not self._connection.poll(timeout_s):
                return None
            (message,) = self._codec.decode(self._connection.recv_bytes())
        except (EOFError, OSError):
            return None
        if not isinstance(message, ReadyMsg | FailedMsg):
            raise ProtocolError(f"{self.name} reported a {type(message).__name__}")
        self._last_report = message
        return message

    @property
    def failure(self) -> FailedMsg | None:
        """The error that it has reported, if any."""
        return self._last_report if isinstance(self._last_report, FailedMsg) else None

    def obituary(self) -> str:
        """Say how a dead worker died: in its own words, or by its exit code."""
        self._process.join(_LAST_WORDS_S)
        while self.report() is not None:
            pass
        return self.explain(self._last_report)

    def explain(self, report: WorkerReport | None) -> str:
        """Say what went wrong, given its last report."""
        if isinstance(report, FailedMsg):
            if report.is_ours:
                return report.text
            return f"{self.name} failed: {report.kind}: {report.text}; its log says more"
        self._process.join(_LAST_WORDS_S)
        code = self.exit_code
        how = (
            f"was killed by signal {-code}" if code is not None and code < 0 else f"ended ({code})"
        )
        return f"{self.name} {how}"

    def join(self, timeout_s: float) -> bool:
        """Wait for its end; whether it has ended."""
        self._process.join(timeout_s)
        return not self._process.is_alive()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()


def find_cause(workers: Sequence[Worker]) -> tuple[Worker, MinisglError]:
    """Return the worker that failed first, now that one has failed, and its error.

    Ranks whose neighbour dies fail with it, in any order. Takes a moment to hear them all.
    """
    time.sleep(_WITNESS_S)
    found: list[tuple[bool, bool, Worker, MinisglError]] = []
    for worker in workers:
        if worker.is_alive and worker.failure is None and not worker.connection.poll():
            continue
        text, failure = worker.obituary(), worker.failure
        if failure is None:
            found.append((False, True, worker, WorkerError(text)))
        else:
            kind = getattr(errors, failure.kind, WorkerError) if failure.is_ours else WorkerError
            found.append((kind is CommError, False, worker, kind(text)))
    # Whoever only misses another rank knows least, and whoever left no word less than the others.
    if not found:
        return workers[0], WorkerError("a worker process has failed")
    _, _, worker, error = min(found, key=lambda each: each[:2])
    return worker, error
