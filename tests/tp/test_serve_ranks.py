"""The server over two ranks."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from minisgl import LLM, SamplingParams
from tests.server.server_process import ServerProcess, events, is_running
from tests.tiny_models import TinyModel

pytestmark = pytest.mark.slow
ModelFolder = Callable[[str, TinyModel], Path]
FLAGS = ("--tp=2", "--dtype=float32", "--num-pages=600", "--page-size=4")


@pytest.fixture(scope="module")
def folder(model_folder: ModelFolder) -> Path:
    spec = TinyModel("llama", num_heads=8, num_kv_heads=2, max_positions=2048)
    return model_folder("long context", spec)


def test_a_server_of_two_ranks_is_four_processes_that_say_what_one_rank_does(
    folder: Path, tmp_path: Path
) -> None:
    with LLM(str(folder), dtype="float32", num_page_override=600, page_size=4) as llm:
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        (expected,) = llm.generate("The capital of", params)
    body = {"prompt": "The capital of", "max_tokens": 20, "ignore_eos": True, "temperature": 0}
    with ServerProcess(folder, tmp_path, *FLAGS, "--num-tokenizer=0") as server:
        server.wait_until_ready()
        assert len(server.workers()) == 3, "one tokenizer, two ranks; and the server itself"
        with server.client() as http:
            answer = http.post("/v1/completions", json=body).json()
        assert answer["choices"][0]["text"] == expected["text"]
        assert server.end() == 0
        assert server.leftovers() == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_server(folder: Path, tmp_path: Path, rank: int) -> None:
    body = {"prompt": "a", "ignore_eos": True, "max_tokens": 1500, "stream": True}
    with ServerProcess(folder, tmp_path, *FLAGS, "--num-tokenizer=0") as server:
        server.wait_until_ready()
        workers = server.workers()
        with (
            server.client() as http,
            http.stream("POST", "/v1/completions", json=body) as response,
        ):
            lines = response.iter_lines()
            next(lines)
            workers[1 + rank].send_signal(signal.SIGKILL)
            killed_at = time.monotonic()
            last = json.loads(events("\n".join(lines))[-1])
        assert f"scheduler {rank} was killed by signal 9" in last["error"]["message"]
        assert server.wait() == 1
        assert time.monotonic() - killed_at < 5.0
        assert not any(map(is_running, workers))
        assert server.leftovers() == []


def test_a_rank_killed_while_it_starts_ends_the_server(folder: Path, tmp_path: Path) -> None:
    with ServerProcess(folder, tmp_path, *FLAGS, "--num-tokenizer=0") as server:
        server.wait_for(lambda: len(server.workers()) == 3)
        workers = server.workers()
        workers[-1].send_signal(signal.SIGKILL)
        assert server.wait() == 1
        assert "scheduler 1 was killed by signal 9" in server.log
        assert not any(map(is_running, workers))
        assert server.leftovers() == []
