"""The server over two ranks."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from minisgl import LLM, SamplingParams
from tests.server.server_process import ServerProcess, is_running
from tests.tiny_models import TinyModel
from tests.tp.killed_rank import check_a_killed_rank_ends_the_server
from tests.tp.spare_clock import GONE_S, PATIENCE_S, SpareClock

pytestmark = pytest.mark.slow
ModelFolder = Callable[[str, TinyModel], Path]
FLAGS = ("--tp=2", "--dtype=float32", "--num-pages=600", "--page-size=4")


@pytest.fixture(scope="module")
def folder(model_folder: ModelFolder) -> Path:
    spec = TinyModel("llama", num_heads=8, num_kv_heads=2, max_positions=2048)
    return model_folder("long context", spec)


@pytest.mark.parametrize("tp", [2, 4])
def test_a_server_is_two_processes_and_its_ranks_and_says_what_one_rank_does(
    folder: Path, tmp_path: Path, tp: int
) -> None:
    with LLM(str(folder), dtype="float32", num_page_override=600, page_size=4) as llm:
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        (expected,) = llm.generate("The capital of", params)
    body = {"prompt": "The capital of", "max_tokens": 20, "ignore_eos": True, "temperature": 0}
    flags = (f"--tp={tp}", *FLAGS[1:])
    with ServerProcess(folder, tmp_path, *flags, "--num-tokenizer=0") as server:
        server.wait_until_ready()
        assert len(server.workers()) == 1 + tp, "one for text, and the ranks; the server is one too"
        with server.client() as http:
            answer = http.post("/v1/completions", json=body).json()
        assert answer["choices"][0]["text"] == expected["text"]
        assert server.end() == 0
        assert server.leftovers() == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_server_with_an_error_for_every_request(
    folder: Path, tmp_path: Path, paced: dict[str, str], rank: int
) -> None:
    check_a_killed_rank_ends_the_server(folder, tmp_path, FLAGS, paced, rank)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_while_nothing_runs_ends_the_server(
    folder: Path, tmp_path: Path, rank: int
) -> None:
    with ServerProcess(folder, tmp_path, *FLAGS, "--num-tokenizer=0") as server:
        server.wait_until_ready()
        workers = server.workers()
        clock = SpareClock()
        workers[1 + rank].send_signal(signal.SIGKILL)
        assert server.wait(PATIENCE_S) == 1
        assert clock.stop() < GONE_S
        assert not any(map(is_running, workers))
        assert server.leftovers() == []


def test_a_rank_killed_while_it_starts_ends_the_server(folder: Path, tmp_path: Path) -> None:
    with ServerProcess(folder, tmp_path, *FLAGS, "--num-tokenizer=0") as server:
        server.wait_for(lambda: len(server.workers()) == 3)
        workers = server.workers()
        clock = SpareClock()
        workers[-1].send_signal(signal.SIGKILL)
        assert server.wait(PATIENCE_S) == 1
        assert clock.stop() < GONE_S
        assert "scheduler 1 was killed by signal 9" in server.log
        assert not any(map(is_running, workers))
        assert server.leftovers() == []


def test_killing_the_server_ends_its_ranks(
    folder: Path, tmp_path: Path, paced: dict[str, str]
) -> None:
    body = {"prompt": "a", "ignore_eos": True, "max_tokens": 1500, "stream": True}
    with ServerProcess(folder, tmp_path, *FLAGS, "--num-tokenizer=0", **paced) as server:
        server.wait_until_ready()
        with server.client() as http, http.stream("POST", "/v1/completions", json=body):
            clock = SpareClock()
            assert server.end(signal.SIGKILL) == -signal.SIGKILL
            assert server.leftovers(PATIENCE_S) == []
            assert clock.stop() < GONE_S
