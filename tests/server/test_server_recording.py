"""``serve --record``: a trace of a real server, replayed by the command."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from minisgl.scheduler.trace import Abort, Arrival, Ending, Trace
from minisgl.scheduler.trace_reading import read_trace
from tests.server.pace import pace_env
from tests.server.server_process import ServerProcess

FLAGS = ("--page-size=4", "--num-pages=64", "--max-prefill-length=16", "--max-running-requests=4")
PROMPTS = [
    "The capital of France is Paris. The capital of Italy",
    "The capital of France is Paris. List three prime numbers",
    "def fibonacci(n): return n",
]


def serve(server: ServerProcess) -> None:
    """Complete some prompts, one of them until its reader leaves."""
    with server.client() as http:
        for prompt in (*PROMPTS, PROMPTS[0]):
            body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True}
            assert http.post("/v1/completions", json=body).status_code == 200
        body = {"prompt": "a", "ignore_eos": True, "max_tokens": 150, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())


def replay(path: Path, *flags: str) -> tuple[int, dict[str, Any]]:  # Any: JSON
    command = [sys.executable, "-m", "minisgl", "replay", str(path), "--json", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def has_ended(path: Path, count: int) -> bool:
    """Whether so many requests have their terminal result, in a trace that is being written."""
    return path.exists() and path.read_bytes().count(b'"event":"ending"') == count


def recorded(model: Path, folder: Path, number: int, *flags: str) -> Trace:
    path = folder / "trace.jsonl"
    flags = (f"--record={path}", *FLAGS, *flags)
    with ServerProcess(model, folder, *flags, **pace_env(folder)) as server:
        server.wait_until_ready()
        serve(server)
        server.wait_for(lambda: has_ended(path, 5))
        server.end(number)
    return read_trace(path)


def test_a_server_can_be_recorded_and_replayed(tiny_model: Path, tmp_path: Path) -> None:
    trace = recorded(tiny_model, tmp_path, signal.SIGTERM, "--record-prompts")
    assert trace.is_complete
    assert sum(isinstance(event, Arrival) for event in trace.events) == 5
    assert any(isinstance(event, Abort) for event in trace.events)
    cached = [event.num_cached for event in trace.events if isinstance(event, Ending)]
    assert max(cached) > 0
    code, report = replay(tmp_path / "trace.jsonl")
    assert (code, report["first"]) == (0, None)
    assert report["has_tokens"]
    code, report = replay(tmp_path / "trace.jsonl", "--decisions-only", "--cache=naive")
    assert code == 1
    assert report["first"]["kind"] == "step"


def test_what_a_killed_server_has_recorded_can_be_replayed(
    tiny_model: Path, tmp_path: Path
) -> None:
    trace = recorded(tiny_model, tmp_path, signal.SIGKILL)
    assert not trace.is_complete
    assert all(e.token_ids is None for e in trace.events if isinstance(e, Arrival | Ending))
    code, report = replay(tmp_path / "trace.jsonl", "--decisions-only")
    assert (code, report["first"], report["is_complete"]) == (0, None, False)
