"""Rough clients for a while, then calm: nothing may be left, and answers must still be right."""

from __future__ import annotations

import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.server.idle import becomes_idle
from tests.server.server_process import START_TIMEOUT_S, ServerProcess, events

NUM_CLIENTS = 12
SECONDS = 40.0
FLAGS = ("--max-running-requests=8", "--max-queued-requests=16", "--num-pages=200")
COMPLETE = "/v1/completions"
GONE = -1
"""In place of a status: there was no answer."""
Act = Callable[[httpx.Client, random.Random], int]


def body_of(rng: random.Random, **extra: Any) -> dict[str, Any]:  # JSON
    prompt = "word " * rng.randint(1, 60) if rng.random() < 0.5 else "shared prefix " * 20
    return {
        "prompt": prompt,
        "max_tokens": rng.randint(1, 120),
        "temperature": rng.choice([0, 1]),
        "n": rng.choice([1, 1, 1, 2]),
        **extra,
    }


def ask(http: httpx.Client, rng: random.Random) -> int:
    return http.post(COMPLETE, json=body_of(rng)).status_code


def stream(http: httpx.Client, rng: random.Random) -> int:
    response = http.post(COMPLETE, json=body_of(rng, stream=True))
    assert response.status_code != 200 or has_ended(response.text)
    return response.status_code


def has_ended(text: str) -> bool:
    """Whether a stream says how it ended."""
    last = events(text)[-1]
    return last == "[DONE]" or "error" in json.loads(last)


def leave_stream(http: httpx.Client, rng: random.Random) -> int:
    body = body_of(rng, stream=True, ignore_eos=True, max_tokens=800)
    with http.stream("POST", COMPLETE, json=body) as response:
        for _, _ in zip(response.iter_bytes(), range(rng.randint(0, 5)), strict=False):
            pass
    return response.status_code


def leave_early(http: httpx.Client, rng: random.Random) -> int:
    body = body_of(rng, ignore_eos=True, max_tokens=800)
    try:
        return http.post(COMPLETE, json=body, timeout=rng.uniform(0.02, 0.5)).status_code
    except httpx.TimeoutException:
        return 0


def read_slowly(http: httpx.Client, rng: random.Random) -> int:
    with http.stream("POST", COMPLETE, json=body_of(rng, stream=True)) as response:
        for _ in response.iter_bytes(64):
            time.sleep(0.01)
    return response.status_code


def abort(http: httpx.Client, rng: random.Random) -> int:
    body = body_of(rng, stream=True, ignore_eos=True, max_tokens=800)
    text, found = "", None
    with http.stream("POST", COMPLETE, json=body) as response:
        for piece in response.iter_text():
            text += piece
            if found is None and (found := re.search(r"cmpl-\w+", text)):
                status = http.post("/abort", json={"request_id": found[0]}).status_code
                assert status in (200, 404)  # it may have ended
    assert response.status_code != 200 or has_ended(text)
    return response.status_code


def send_garbage(http: httpx.Client, rng: random.Random) -> int:
    return http.post(COMPLETE, content=rng.randbytes(rng.randint(0, 200))).status_code


def ask_too_much(http: httpx.Client, rng: random.Random) -> int:
    return http.post(COMPLETE, json={"prompt": [5] * rng.randint(2048, 9999)}).status_code


ACTS: list[Act] = [
    ask,
    stream,
    leave_stream,
    leave_early,
    read_slowly,
    abort,
    send_garbage,
    ask_too_much,
]


@pytest.mark.slow
def test_rough_clients_leave_nothing_behind(tiny_model: Path, tmp_path: Path) -> None:
    with ServerProcess(tiny_model, tmp_path, *FLAGS) as server:
        server.wait_until_ready()
        with server.client() as http:
            fixed = {"prompt": "The capital", "max_tokens": 40, "temperature": 0}
            before = http.post(COMPLETE, json=fixed).json()["choices"]
            statuses = be_rough(server, SECONDS)
            assert statuses[200] > 0
            assert set(statuses) <= {0, 200, 400, 503}, statuses
            assert becomes_idle(http), http.get("/metrics").text
            assert http.post(COMPLETE, json=fixed).json()["choices"] == before
        assert "Traceback" not in server.log
        assert server.end() == 0
        assert server.leftovers() == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1], ids=["text", "scheduler"])
def test_a_worker_that_dies_under_load_leaves_nothing_behind(
    tiny_model: Path, tmp_path: Path, number: int
) -> None:
    with ServerProcess(tiny_model, tmp_path, *FLAGS) as server:
        server.wait_until_ready()
        with ThreadPoolExecutor(1) as pool:
            rough = pool.submit(be_rough, server, START_TIMEOUT_S)
            time.sleep(5)
            server.workers()[number].kill()
            statuses = rough.result()
        assert statuses[GONE] == NUM_CLIENTS  # each went on until there was no server any more
        assert statuses[200] > 0
        assert set(statuses) <= {GONE, 0, 200, 400, 500, 503}, statuses
        assert "Traceback" not in server.log
        assert server.wait() == 1
        assert server.leftovers() == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_memory_does_not_grow_over_ten_thousand_requests(tiny_model: Path, tmp_path: Path) -> None:
    with ServerProcess(tiny_model, tmp_path, "--num-pages=200") as server:
        server.wait_until_ready()
        processes = [psutil.Process(server.process.pid), *server.workers()]
        sizes = []
        for _ in range(10):
            run_short(server, 1000)
            sizes.append([process.memory_info().rss for process in processes])
        # The first two thousand fill caches and allocators.
        growth = [last - first for first, last in zip(sizes[1], sizes[-1], strict=True)]
        assert max(growth) < 8 * 2**20, sizes


def be_rough(server: ServerProcess, seconds: float) -> Counter[int]:
    """Let clients do anything for a time, or until the server has gone; what they got."""
    deadline = time.monotonic() + seconds

    def client(seed: int) -> Counter[int]:
        rng, counts = random.Random(seed), Counter[int]()
        while time.monotonic() < deadline and not counts[GONE]:
            with server.client() as http:
                try:
                    counts[rng.choice(ACTS)(http, rng)] += 1
                except httpx.TransportError:
                    counts[GONE] += 1
        return counts

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        return sum(pool.map(client, range(NUM_CLIENTS)), Counter())


def run_short(server: ServerProcess, num_requests: int) -> None:
    def client(number: int) -> None:
        with server.client() as http:
            for i in range(num_requests // 8):
                body = {"prompt": f"{number} {i} " * 5, "max_tokens": 2}
                assert http.post(COMPLETE, json=body).status_code == 200

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(client, range(8)))
