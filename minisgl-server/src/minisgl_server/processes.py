"""Starting, watching and ending the worker processes."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import time
from collections.abc import Callable
from multiprocessing import connection as mp_connection
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import TYPE_CHECKING

from minisgl.errors import MinisglError, ProtocolError
from minisgl.message.lifecycle import FailedMsg, ReadyMsg, WorkerReport
from minisgl.message.wire import wire_codec
from minisgl.workers.contract import Endpoints, LogOptions, Role, WorkerSpec
from minisgl.workers.main import run_worker

if TYPE_CHECKING:
    from minisgl.config.load import Settings

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_LAST_WORDS_S = 0.5


class WorkerError(MinisglError):
    """A worker process could not start, or died; the message is its own error."""


class Worker:
    """One worker process and the pipe to it."""

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
        self._process.start()
        theirs.close()
        self._codec = wire_codec()

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

    def report(self, timeout_s: float = 0.0) -> WorkerReport | None:
        """Return what the worker says of itself, if anything."""
        try:
            if not self._connection.poll(timeout_s):
                return None
            (message,) = self._codec.decode(self._connection.recv_bytes())
        except (EOFError, OSError):
            return None
        if not isinstance(message, ReadyMsg | FailedMsg):
            raise ProtocolError(f"{self.name} reported a {type(message).__name__}")
        return message

    def obituary(self) -> str:
        """Say how a dead worker died: in its own words, or by its exit code."""
        self._process.join(_LAST_WORDS_S)
        return self.explain(self.report(_LAST_WORDS_S))

    def explain(self, report: WorkerReport | None) -> str:
        """Say what went wrong, given its last report."""
        if isinstance(report, FailedMsg):
            if report.is_ours:
                return report.text
            return f"{self.name} failed: {report.kind}: {report.text}; its log says more"
        self._process.join(_LAST_WORDS_S)
        code = self._process.exitcode
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


class WorkerGroup:
    """All workers of one server; whoever makes it ends it with `stop` or `kill`."""

    def __init__(self, settings: Settings, endpoints: Endpoints, log: LogOptions) -> None:
        """Start every worker; none is ready yet.

        Args:
            settings: All settings.
            endpoints: Where everyone listens.
            log: How they log.
        """
        roles: list[tuple[Role, int]] = [("detokenizer", 0)]
        roles += [("tokenizer", i) for i in range(endpoints.num_tokenizers)]
        roles += [("scheduler", rank) for rank in range(settings.engine.tp)]
        packed, pid = pickle.dumps(settings), os.getpid()
        self.workers: list[Worker] = []
        try:
            for role, index in roles:
                spec = WorkerSpec(role, index, packed, endpoints, pid, log)
                self.workers.append(Worker(spec))
        except BaseException:
            self.kill()
            raise

    def wait_until_ready(
        self, timeout_s: float, should_stop: Callable[[], bool] = lambda: False
    ) -> dict[str, ReadyMsg]:
        """Wait until every worker serves.

        Args:
            timeout_s: For all of them together.
            should_stop: Asked several times a second; waiting ends when it says so.

        Returns:
            What each worker reported, by its name; incomplete if it was told to stop.

        Raises:
            WorkerError: A worker failed or did not become ready in time; the message is the
                worker's own error.
        """
        deadline = time.monotonic() + timeout_s
        waiting = {worker.connection: worker for worker in self.workers}
        ready: dict[str, ReadyMsg] = {}
        while waiting and not should_stop():
            if time.monotonic() > deadline:
                names = ", ".join(worker.name for worker in waiting.values())
                raise WorkerError(
                    f"--startup-timeout-s {timeout_s:g}: {names} did not become ready in time"
                )
            for item in mp_connection.wait(list(waiting), _POLL_S):
                assert isinstance(item, Connection), "only connections are waited for"
                worker = waiting[item]
                report = worker.report()
                if not isinstance(report, ReadyMsg):
                    raise WorkerError(worker.explain(report))
                ready[worker.name] = report
                del waiting[item]
        return ready

    @property
    def dead(self) -> list[Worker]:
        """Workers that have ended."""
        return [worker for worker in self.workers if not worker.is_alive]

    def stop(self, timeout_s: float) -> None:
        """Wait for workers that were told to exit, then end the rest."""
        deadline = time.monotonic() + timeout_s
        for worker in self.workers:
            if not worker.join(max(0.0, deadline - time.monotonic())):
                logger.warning("%s did not exit in time and is killed", worker.name)
        self.kill()

    def kill(self) -> None:
        """End every worker at once and wait until they are gone."""
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.join(5.0)
