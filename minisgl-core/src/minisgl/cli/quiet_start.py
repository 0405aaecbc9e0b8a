"""Ctrl-C while a command is still being found and imported.

Until `end_quiet_start` it ends the process at once and without a word. An exception would come up
in the middle of an import, where extension modules turn it into errors of their own or drop it, or
before there is anybody to catch it. Nothing needs to be cleared up yet.
"""

from __future__ import annotations

# What is behind `signal`, which takes longer to import than all that comes before it here.
import _signal  # type: ignore[import-not-found]  # typed as `signal` only
import os

EXIT_FAILED, EXIT_USAGE = 1, 2
EXIT_INTERRUPTED = 130  # what a shell reports for SIGINT


def begin_quiet_start() -> None:
    """Let Ctrl-C be quiet; for the main thread of a program.

    Where SIGINT is ignored, or somebody else handles it, that stays so.
    """
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _leave)


def end_quiet_start() -> None:
    """Let Ctrl-C be an exception, as ever, if `begin_quiet_start` has changed that."""
    if _signal.getsignal(_signal.SIGINT) is _leave:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)


def _leave(number: int, frame: object) -> None:
    os._exit(EXIT_INTERRUPTED)
