"""How soon something ends, on a machine that may have much else to do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import psutil

GONE_S = 5.0
"""How soon after a rank's death all is over, in seconds with a CPU to spare."""

PATIENCE_S = 180.0
"""What is not over by then hangs, however busy the machine is."""

_TICK_S = 0.1


def idle_cpu_s() -> float:
    """Seconds in which CPUs had nothing to do, of all CPUs together."""
    times = psutil.cpu_times()
    return float(times.idle + getattr(times, "iowait", 0.0))


class SpareClock:
    """Counts the seconds in which the machine had a CPU to spare, from when it is made.

    While a CPU is idle, nobody waits for one: what ends late then does so by its own fault. On a
    quiet machine these are the seconds of any clock; on one that is busy with other things they
    pass more slowly or not at all, and `PATIENCE_S` is what limits the wait.
    """

    def __init__(self, idle_s: Callable[[], float] = idle_cpu_s) -> None:
        """Start; ``idle_s`` is a sum over CPUs of the time that each has been idle."""
        self._idle_s = idle_s
        self._spare_s = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spare clock", daemon=True)
        self._thread.start()

    def stop(self) -> float:
        """Return how many such seconds have passed."""
        self._end.set()
        self._thread.join()
        return self._spare_s

    def _run(self) -> None:
        before, idle_before = time.monotonic(), self._idle_s()
        is_over = False
        while not is_over:
            is_over = self._end.wait(_TICK_S)
            now, idle = time.monotonic(), self._idle_s()
            if idle - idle_before >= (now - before) / 2:  # its clock has ticks of 10 ms
                self._spare_s += now - before
            before, idle_before = now, idle


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {PATIENCE_S:g} s"
        time.sleep(0.02)
