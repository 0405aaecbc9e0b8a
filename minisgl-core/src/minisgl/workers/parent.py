"""A worker's tie to the process that started it: it never outlives its parent."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def holding_terminal_signals() -> Iterator[None]:
    """Start processes inside of this block whose first instruction already holds these signals.

    They inherit what is blocked here, and let go of it in `ignore_terminal_signals`. What comes to
    this thread meanwhile is handled when the block ends.
    """
    resource_tracker.ensure_running()  # or it would start inside, and unblock them when it has
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TERMINAL_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_terminal_signals() -> None:
    """Leave Ctrl-C and a service manager's SIGTERM, which reach the whole group, to the parent."""
    for each in _TERMINAL_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    # Not before: whatever has come since the process was started is dropped by ignoring it.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _TERMINAL_SIGNALS)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to end this process together with its parent, where it can (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)


def watch_parent(connection: Connection, folder: Path) -> None:
    """End this process when the other end of a pipe closes, and clear up after the parent.

    Args:
        connection: Never written to by the parent; its end says that the parent has gone.
        folder: Socket folder, which a killed parent could not remove.
    """

    def wait() -> None:
        with suppress(OSError):
            connection.poll(None)
        shutil.rmtree(folder, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="parent watch", daemon=True).start()
