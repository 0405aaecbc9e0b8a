"""SIGINT and SIGTERM: the first asks for an orderly end, the second ends at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType, TracebackType

EXIT_INTERRUPTED = 130  # what a shell reports for SIGINT

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Handles both signals inside of a ``with`` block, on the main thread.

    Attributes:
        is_asked: Whether a signal has come.
        on_ask: Called with the signal's name when the first one comes; may be replaced.
        last_acts: Run, the newest first, before the process ends at once; may be added to.
    """

    def __init__(self) -> None:
        """Prepare."""
        self.is_asked = False
        self.on_ask: Callable[[str], None] = lambda name: None
        self.last_acts: list[Callable[[], None]] = []
        self._before: dict[signal.Signals, object] = {}

    def handle(self, number: int) -> None:
        """Take a signal."""
        if self.is_asked:
            try:
                for act in reversed(self.last_acts):
                    act()
            finally:
                os._exit(EXIT_INTERRUPTED)
        self.is_asked = True
        self.on_ask(signal.Signals(number).name)

    def __enter__(self) -> Interrupts:
        for each in _SIGNALS:
            self._before[each] = signal.signal(each, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for each, before in self._before.items():
            signal.signal(each, before)  # type: ignore[arg-type]  # what signal.signal returned

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.handle(number)
