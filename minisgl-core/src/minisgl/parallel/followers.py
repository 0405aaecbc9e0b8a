"""The processes of ranks 1 and up: starting, watching and ending them."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection as mp_connection
from multiprocessing.connection import Connection
from pathlib import Path

from minisgl.config.load import Settings
from minisgl.config.placement import Placement
from minisgl.errors import MinisglError, WorkerError
from minisgl.message.lifecycle import ReadyMsg
from minisgl.workers.contract import Endpoints, LogOptions, WorkerSpec
from minisgl.workers.process import Worker, find_cause

logger = logging.getLogger(__name__)

_KILL_S = 5.0

_NO_MAIN_GUARD = (
    "; a script that makes an LLM with several ranks must do so under `if __name__ == "
    '"__main__":`, because every rank imports it'
)


@dataclass(frozen=True, slots=True)
class FollowerPlan:
    """Which processes to start.

    Attributes:
        settings: For all of them.
        endpoints: Where ranks meet.
        on_failure: Told the cause, once, by the thread that watches, when one of them has failed
            and the others have been ended.
    """

    settings: Settings
    endpoints: Endpoints
    on_failure: Callable[[MinisglError], None]

    def specs(self) -> list[WorkerSpec]:
        """Describe each process; those of other nodes are started there."""
        level = logging.getLevelName(logging.getLogger("minisgl").getEffectiveLevel())
        log = LogOptions(level if isinstance(level, str) else "WARNING")
        packed, pid = pickle.dumps(self.settings), os.getpid()
        ranks = Placement.of(self.settings.engine).ranks[1:]
        return [WorkerSpec("scheduler", r, packed, self.endpoints, pid, log) for r in ranks]


class Followers:
    """Ranks 1 and up. When one of them ends, all do.

    One thread starts, watches and reaps them. It has to be one that lives as long as they do: to
    the kernel, which ends them when their parent does, the parent is the thread.
    """

    def __init__(self, plan: FollowerPlan) -> None:
        """Begin to start them."""
        self._plan = plan
        self._specs = plan.specs()
        self._ready = threading.Event()  # also when they failed
        self._failure: MinisglError | None = None
        self._end_timeout_s = 0.0
        self._wake, self._woken = multiprocessing.Pipe()
        self._thread = threading.Thread(target=self._run, name="minisgl rank watch", daemon=True)
        self._thread.start()

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until every one serves.

        Raises:
            MinisglError: The error of one that failed, or they were not ready in time.
        """
        if not self._ready.wait(timeout_s):
            raise WorkerError(
                f"--distributed-timeout-s {timeout_s:g}: not all ranks were ready in time"
            )
        if self._failure is not None:
            raise self._failure

    def wait_for_failure(self, timeout_s: float) -> MinisglError | None:
        """Wait for one of them to fail, and return the cause."""
        self._thread.join(timeout_s if self._specs else 0.0)
        return self._failure

    def end(self, timeout_s: float = 0.0) -> None:
        """Wait until they have exited, as they have been told to, then kill what is left.

        Safe to call twice. Returns when they are gone.
        """
        self._end_timeout_s = timeout_s
        if self._thread.is_alive():
            self._wake.send_bytes(b"end")
            self._thread.join(timeout_s + _KILL_S)

    def _run(self) -> None:
        """Live as long as they do."""
        workers: list[Worker] = []
        try:
            for spec in self._specs:
                workers.append(Worker(spec))
            self._watch(workers)
        except Exception as error:
            logger.exception("ranks could not be started or watched")
            self._failure = WorkerError(f"ranks could not start: {type(error).__name__}: {error}")
        self._reap(workers)
        self._ready.set()
        if self._failure is not None:
            self._plan.on_failure(self._failure)

    def _reap(self, workers: list[Worker]) -> None:
        """Give those that were told to exit their time, and end the rest."""
        if self._failure is None:
            deadline = time.monotonic() + self._end_timeout_s
            for worker in workers:
                if worker.join(max(0.0, deadline - time.monotonic())) and worker.exit_code:
                    logger.error("at its end: %s", worker.obituary())
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.join(_KILL_S)

    def _watch(self, workers: list[Worker]) -> None:
        """Return when they shall end, or when one has failed."""
        starting = {worker.connection: worker for worker in workers}
        sentinels = {worker.sentinel: worker for worker in workers}
        while True:
            is_starting = bool(starting)
            if not is_starting:
                self._ready.set()
            for item in mp_connection.wait([self._woken, *starting, *sentinels]):
                if item is self._woken:
                    return
                if isinstance(item, Connection):
                    worker = starting.pop(item)
                    if isinstance(worker.report(), ReadyMsg):
                        continue
                self._failure = _cause(workers, is_starting)
                return


def _cause(workers: Sequence[Worker], is_starting: bool) -> MinisglError:
    """Return the error of the process that failed first."""
    worker, error = find_cause(workers)
    if is_starting and worker.failure is None and worker.exit_code == 1:
        return WorkerError(f"{error}{_NO_MAIN_GUARD}")
    return error


def endpoints_in(folder: Path) -> Endpoints:
    """Return the places of ranks that meet in ``folder``."""
    return Endpoints(folder, num_tokenizers=0)
