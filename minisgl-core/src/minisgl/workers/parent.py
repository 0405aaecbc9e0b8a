"""A worker's tie to the process that started it: it never outlives its parent."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def ignore_terminal_signals() -> None:
    """Leave Ctrl-C and a service manager's SIGTERM, which reach the whole group, to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


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
