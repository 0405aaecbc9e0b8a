"""Ctrl-C while a command is still being found and imported."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_FAILED, EXIT_USAGE = 1, 2
EXIT_INTERRUPTED = 130  # what a shell reports for SIGINT


@contextmanager
def quiet_start() -> Iterator[None]:
    """End the process at once and without a word when Ctrl-C comes inside of the block.

    An exception would come up in the middle of an import, where extension modules turn it into
    errors of their own or drop it. Nothing needs to be cleared up yet. For the main thread of a
    program; where SIGINT is ignored, or somebody else handles it, that stays so.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(EXIT_INTERRUPTED)
