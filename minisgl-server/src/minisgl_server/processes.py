"""Starting, watching and ending the worker processes."""

from __future__ import annotations

import logging
import os
import pickle
import time
from collections.abc import Callable
from multiprocessing import connection as mp_connection
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from minisgl.config.placement import Placement
from minisgl.errors import MinisglError, WorkerError
from minisgl.message.lifecycle import ReadyMsg
from minisgl.workers.contract import Endpoints, LogOptions, Role, WorkerSpec
from minisgl.workers.process import Worker, find_cause

if TYPE_CHECKING:
    from minisgl.config.load import Settings

logger = logging.getLogger(__name__)

_POLL_S = 0.2


class WorkerGroup:
    """All workers of one node; whoever makes it ends it with `stop` or `kill`.

    The first node has those that turn text into tokens and back, and rank 0.
    """

    def __init__(self, settings: Settings, endpoints: Endpoints, log: LogOptions) -> None:
        """Start every worker; none is ready yet.

        Args:
            settings: All settings.
            endpoints: Where everyone listens.
            log: How they log.
        """
        placement = Placement.of(settings.engine)
        roles: list[tuple[Role, int]] = []
        if placement.is_first:
            roles.append(("detokenizer", 0))
            roles += [("tokenizer", i) for i in range(endpoints.num_tokenizers)]
        roles += [("scheduler", rank) for rank in placement.ranks]
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
            WorkerError: A worker did not become ready in time, or died without a word.
            MinisglError: A worker failed; the error is its own.
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
                    raise self.cause()
                ready[worker.name] = report
                del waiting[item]
        return ready

    def cause(self) -> MinisglError:
        """Find out which worker failed first, now that one has failed, and return its error."""
        return find_cause(self.workers)[1]

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
