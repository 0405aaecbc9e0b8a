from __future__ import annotations

import time

from tests.tp.spare_clock import SpareClock


def test_it_goes_while_a_cpu_is_idle() -> None:
    started = time.monotonic()
    clock = SpareClock(time.monotonic)
    time.sleep(0.25)
    assert 0.2 < clock.stop() <= time.monotonic() - started


def test_it_stands_still_while_every_cpu_is_busy() -> None:
    clock = SpareClock(lambda: 100.0)
    time.sleep(0.25)
    assert clock.stop() == 0.0
