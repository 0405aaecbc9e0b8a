"""The host's work for one steady decode step, counted instead of timed."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from minisgl.message.types import UserMsg
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.io import OfflineIO
from minisgl.scheduler.scheduler import Scheduler
from minisgl.testing.fake_engine import InstantEngine, make_limits
from tests.core.scheduler.harness import make_cache, make_policy

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "scheduler_host.py"


def python_calls_of_a_step(batch_size: int) -> int:
    """Count the Python functions that a step enters while ``batch_size`` requests decode."""
    limits = make_limits(num_pages=2000, page_size=16, max_running_reqs=256, max_seq_len=200)
    io = OfflineIO()
    scheduler = Scheduler(
        InstantEngine(limits), make_cache("radix", 16), make_policy("fcfs"), io, SchedulerConfig()
    )
    params = SamplingParams(max_tokens=100)
    io.put(UserMsg(uid, np.full(20, uid % 90, np.int32), params) for uid in range(batch_size))
    for _ in range(20):
        scheduler.step()
    assert scheduler.stats().num_running == batch_size
    num_calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num_calls
        del frame, argument
        num_calls += event == "call"

    sys.setprofile(count)
    try:
        scheduler.step()
    finally:
        sys.setprofile(None)
    return num_calls


def test_a_steady_step_calls_no_python_function_per_request() -> None:
    assert python_calls_of_a_step(256) == python_calls_of_a_step(16) < 100


def test_the_benchmark_prints_a_row_per_batch_size(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [str(BENCHMARK), "--batch-sizes", "1", "4", "--steps", "20", "--cache", "naive"]
    monkeypatch.setattr(sys, "argv", command)
    runpy.run_path(str(BENCHMARK), run_name="__main__")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["1", "4"]
    assert all(float(row[1]) > 0 for row in rows)
