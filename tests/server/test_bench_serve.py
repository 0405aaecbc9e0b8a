from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from minisgl.errors import SettingsError
from minisgl_server.bench.command import summarize, table
from minisgl_server.bench.http_stream import Timing
from minisgl_server.bench.plot import check_plot, write_plot
from minisgl_server.bench.workload import shared_prefix_tasks
from tests.server.server_process import ServerProcess

NO_LIMITS = Namespace(goodput_ttft_s=None, goodput_itl_s=None)


def bench(server: ServerProcess, *flags: str) -> dict[str, Any]:  # plain numbers
    run = [sys.executable, "-m", "minisgl", "bench", "serve", f"--url={server.url}/v1", *flags]
    result = subprocess.run([*run, "--json"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    report: dict[str, Any] = json.loads(result.stdout)  # plain numbers
    return report


@pytest.mark.parametrize(
    "flags",
    [["--concurrency=2"], ["--request-rate=50"], ["--shared-prefixes=2", "--goodput-ttft-s=1e-9"]],
    ids=["closed", "open", "shared"],
)
def test_every_request_is_timed(server: ServerProcess, flags: list[str]) -> None:
    sizes = ["--num-requests=6", "--max-tokens=5", "--prompt-words=20", "--ignore-eos"]
    report = bench(server, *sizes, *flags)
    assert (report["num_requests"], report["num_failed"]) == (6, 0)
    assert report["output_tokens_per_s"] * report["seconds"] == pytest.approx(30, rel=0.05)
    assert 0 < report["ttft_ms"]["p50"] <= report["e2e_ms"]["p50"] <= report["e2e_ms"]["p99"]
    assert (report["goodput_requests_per_s"] > 0) is ("--goodput-ttft-s=1e-9" not in flags)


def test_a_trace_is_replayed(server: ServerProcess, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"prompt": "a", "max_tokens": 3}\n{"prompt": "b"}\n')
    report = bench(server, f"--trace={path}", "--max-tokens=4", "--ignore-eos")
    assert report["output_tokens_per_s"] * report["seconds"] == pytest.approx(7, rel=0.05)


def test_a_trace_says_when_its_requests_come(server: ServerProcess, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"prompt": "a", "arrival_s": 0}\n{"prompt": "b", "arrival_s": 1.5}\n')
    assert bench(server, f"--trace={path}", "--max-tokens=1")["seconds"] >= 1.5


def test_a_picture_is_drawn(server: ServerProcess, tmp_path: Path) -> None:
    path = tmp_path / "bench.png"
    bench(server, f"--plot={path}", "--num-requests=8", "--max-tokens=8", "--prompt-words=9")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_nothing_can_be_drawn(tmp_path: Path) -> None:
    path = tmp_path / "bench.svg"
    write_plot(path, [Timing(0.0, error="refused")], "nothing")
    assert "<svg" in path.read_text()


def test_without_matplotlib_a_picture_is_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SettingsError, match=r"needs matplotlib; pip install .*\[plot\]"):
        check_plot(tmp_path / "bench.png")


def test_percentiles_are_those_of_the_times() -> None:
    timings = [Timing(0.0, [0.01 * i, 0.01 * i + 0.002], 0.02 * i, 1, 2) for i in range(1, 101)]
    timings.append(Timing(0.0, error="refused"))
    report = summarize(timings, 10.0, NO_LIMITS)
    assert report["num_failed"] == 1
    assert report["ttft_ms"] == {"mean": 505.0, "p50": 500.0, "p90": 900.0, "p99": 990.0}
    assert report["itl_ms"]["p99"] == pytest.approx(2.0)
    assert report["output_tokens_per_s"] == 20.0
    assert "p99" in table(report)


def test_prompts_of_a_group_share_their_beginning() -> None:
    prompts = [task.prompt for task in shared_prefix_tasks(20, 100, 1, seed=0, num_groups=2)]
    assert len({prompt[:300] for prompt in prompts}) == 2
    assert len(set(prompts)) == 20


@pytest.mark.parametrize(
    ("flag", "complaint"),
    [
        ("--url=nowhere", "--url nowhere: must begin"),
        ("--url=http://127.0.0.1:9/v1", "no server answers"),
        ("--url=http://127.0.0.1:abc/v1", "is no URL: "),
        ("--request-rate=0", "--request-rate 0.0: must be a number above 0"),
        ("--trace=/nowhere", "--trace /nowhere: cannot be read"),
        ("--num-requests=0", "--num-requests 0: must be an integer from 1 to 10000000"),
        ("--plot=x.bmp", "--plot x.bmp: must end in .png"),
        ("--plot=/nowhere/x.png", "there is no folder /nowhere"),
    ],
)
def test_a_wrong_flag_is_one_line(flag: str, complaint: str) -> None:
    run = [sys.executable, "-m", "minisgl", "bench", "serve", flag]
    result = subprocess.run(run, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert complaint in result.stderr
    assert "Traceback" not in result.stderr
