"""A node other than the first: its ranks follow rank 0, and end with it."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from multiprocessing import connection as mp_connection
from typing import TYPE_CHECKING

from minisgl.config.placement import Placement
from minisgl.message.folder import SocketFolder
from minisgl.workers.contract import Endpoints, LogOptions
from minisgl_server.interrupts import EXIT_INTERRUPTED, Interrupts
from minisgl_server.processes import WorkerGroup
from minisgl_server.settings import ServerSettings

if TYPE_CHECKING:
    from minisgl.config.load import Settings

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_EXIT_TIMEOUT_S = 10.0


def run(settings: Settings, log: LogOptions) -> int:
    """Run this node's ranks until those of node 0 end, or a signal comes.

    Returns:
        0 when node 0 has ended in order, and after SIGTERM or Ctrl-C, which ends the other nodes
        with an error; 1 when a rank is lost, 130 after an interrupted start.

    Raises:
        MinisglError: A rank could not start; the error is its own.
    """
    placement = Placement.of(settings.engine)
    own = settings.section(ServerSettings)
    with ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts())
        folder = SocketFolder()
        group = WorkerGroup(settings, Endpoints(folder.path, own.num_tokenizer), log)
        stack.callback(group.kill)
        interrupts.last_acts.append(group.kill)
        folder.remove()  # these ranks have no sockets, and meet the others at a port
        group.wait_until_ready(own.startup_timeout_s, lambda: interrupts.is_asked)
        if interrupts.is_asked:
            return EXIT_INTERRUPTED
        logger.info(
            "ready: node %d of %d follows %s with ranks %d to %d",
            placement.node_rank,
            placement.nnodes,
            placement.master,
            placement.ranks[0],
            placement.ranks[-1],
        )
        return _watch(group, interrupts)


def _watch(group: WorkerGroup, interrupts: Interrupts) -> int:
    """Wait for the end of a rank, and return the exit code."""
    workers = {worker.sentinel: worker for worker in group.workers}
    while not (ended := mp_connection.wait(list(workers), _POLL_S)):
        if interrupts.is_asked:
            logger.info("this node ends, and the others with it")
            return 0
    first = workers[ended[0]]  # type: ignore[index]  # only sentinels are waited for
    first.join(_EXIT_TIMEOUT_S)  # the sentinel comes a moment before the exit code
    if first.exit_code:
        logger.error("%s; this node ends", group.cause())
        return 1
    group.stop(_EXIT_TIMEOUT_S)
    logger.info("node 0 has ended")
    return 0
