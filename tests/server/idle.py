"""Waiting until a server has nothing left to do."""

from __future__ import annotations

import re
import time

import httpx

GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


def gauge(http: httpx.Client, name: str) -> float:
    """The value of a metric without labels."""
    found = re.search(rf"^minisgl:{name} (\S+)$", http.get("/metrics").text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def becomes_idle(http: httpx.Client, timeout_s: float = 20.0) -> bool:
    """Whether soon nothing runs or waits, and every page is free or can be evicted."""
    deadline = time.monotonic() + timeout_s
    while any(gauge(http, name) for name in GAUGES):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
