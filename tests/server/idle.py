"""Waiting for what a server is about to do; long, as the machine may have much else to do."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import httpx

PATIENCE_S = 60.0
"""Less than an answer of 1900 tokens takes a server with `tests.server.pace`."""

GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


def gauge(http: httpx.Client, name: str) -> float:
    """The value of a metric, with its labels if it has any."""
    found = re.search(rf"^minisgl:{re.escape(name)} (\S+)$", http.get("/metrics").text, re.M)
    assert found is not None, name
    return float(found[1])


def num_aborted(http: httpx.Client) -> int:
    """How many sequences have been aborted so far."""
    return int(gauge(http, 'request_success_total{finished_reason="abort"}'))


def wait_until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> bool:
    """Whether a condition soon holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def becomes_idle(http: httpx.Client) -> bool:
    """Whether soon nothing runs or waits, and every page is free or can be evicted."""
    return wait_until(lambda: not any(gauge(http, name) for name in GAUGES))
