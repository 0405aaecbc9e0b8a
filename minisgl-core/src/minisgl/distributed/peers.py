"""The processes of a group's ranks: which are on this machine, and whether they still run."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing import connection as mp_connection
from pathlib import Path

logger = logging.getLogger(__name__)

RANK_ENDED = "another rank is gone: its process has ended"

_GRACE_S = 1.0  # ranks that end in order do so within this time of each other
_CLOSE_S = 2.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = "/proc/self/ns/pid"


def host_identity() -> bytes:
    """Return 16 bytes that processes share which can see each other by their process ids."""
    try:
        text = _BOOT_ID.read_text() + os.readlink(_NAMESPACE)
    except OSError:  # not Linux
        text = os.uname().nodename
    return hashlib.sha256(text.encode()).digest()[:16]


class PeerWatch:
    """Tells once, from a thread of its own, that another rank has ended.

    A kernel that waits for another GPU does not notice that nobody will come; whoever is told here
    ends its waiting. Neither does a rank that has nothing to do, and waits for a request.
    """

    def __init__(
        self,
        pids: Sequence[int],
        on_lost: Callable[[], None],
        links: Sequence[socket.socket] = (),
    ) -> None:
        """Begin to watch.

        Args:
            pids: Processes of this machine; this one itself is left out.
            on_lost: Called at most once, when the first of them has ended and this watch has not
                been closed within a second.
            links: Connections to ranks that say nothing over them; closed by `close`.
        """
        self._on_lost = on_lost
        self._links = tuple(links)
        self._wake, self._woken = Pipe()
        self._pids = [pid for pid in pids if pid != os.getpid()]
        if not hasattr(os, "pidfd_open"):
            self._pids = []
        self._thread = threading.Thread(target=self._run, name="minisgl peer watch", daemon=True)
        if self._pids or self._links:
            self._thread.start()

    def close(self) -> None:
        """Stop watching; safe to call twice."""
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._wake.send_bytes(b"close")
            self._thread.join(_CLOSE_S)  # it may be busy with a rank that is lost
        for link in self._links:
            link.close()

    def _run(self) -> None:
        descriptors: list[int] = []
        with suppress(ProcessLookupError):  # it has ended already
            try:
                for pid in self._pids:
                    descriptors.append(os.pidfd_open(pid))
                mp_connection.wait([self._woken, *self._links, *descriptors])
            except ProcessLookupError:
                raise
            except OSError as error:
                logger.warning("other ranks cannot be watched: %s", error)
                return
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        if not self._woken.poll(_GRACE_S):
            self._on_lost()


def attempt(work: Callable[[], None], timeout_s: float) -> bool:
    """Do something that may never come to its end, in a thread of its own.

    Args:
        work: What to do.
        timeout_s: How long to wait for it; after that it is left to itself.

    Returns:
        Whether it came to its end in time.
    """
    thread = threading.Thread(target=work, name="minisgl attempt", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()
