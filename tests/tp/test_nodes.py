"""Several nodes: each a process tree of its own, on this machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from minisgl import LLM, SamplingParams
from minisgl.errors import MinisglError, SettingsError, WorkerError
from tests.server.server_process import START_TIMEOUT_S, ServerProcess, events
from tests.tiny_models import TinyModel
from tests.tp.spare_clock import GONE_S, PATIENCE_S, SpareClock, wait_for

pytestmark = pytest.mark.slow
ModelFolder = Callable[[str, TinyModel], Path]
FLAGS = ("--dtype=float32", "--num-pages=600", "--page-size=4", "--num-tokenizer=0")
SETTINGS = {"dtype": "float32", "num_page_override": 600, "page_size": 4}
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(model_folder: ModelFolder) -> Path:
    spec = TinyModel("llama", num_heads=8, num_kv_heads=2, max_positions=2048)
    return model_folder("long context", spec)


@pytest.fixture
def master() -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"127.0.0.1:{taken.getsockname()[1]}"


def node_flags(tp: int, master: str, node_rank: int, nnodes: int = 2) -> tuple[str, ...]:
    places = (f"--nnodes={nnodes}", f"--node-rank={node_rank}", f"--master={master}")
    return (f"--tp={tp}", *places, *FLAGS)


@contextmanager
def nodes(
    folder: Path, tmp_path: Path, tp: int, master: str, **env: str
) -> Iterator[list[ServerProcess]]:
    """Two nodes of a server, both ready."""
    with ExitStack() as stack:
        made = []
        for node_rank in (1, 0):  # the one that waits for the other begins
            place = tmp_path / f"node-{node_rank}"
            place.mkdir()
            node = ServerProcess(folder, place, *node_flags(tp, master, node_rank), **env)
            made.append(stack.enter_context(node))
        follower, first = made
        first.wait_until_ready()
        follower.wait_for(lambda: "ready: node 1 of 2" in follower.log, START_TIMEOUT_S)
        follower.descendants()
        yield [first, follower]


@contextmanager
def follower_of(folder: Path, tmp_path: Path, tp: int, master: str) -> Iterator[ServerProcess]:
    """The second node of an offline engine."""
    with ServerProcess(folder, tmp_path, *node_flags(tp, master, 1)) as follower:
        yield follower


def expected_text(folder: Path) -> str:
    with LLM(str(folder), **SETTINGS) as llm:
        return llm.generate("The capital of", GREEDY)[0]["text"]


@pytest.mark.parametrize("tp", [2, 4])
def test_a_server_of_two_nodes_says_what_one_rank_does(
    folder: Path, tmp_path: Path, tp: int, master: str
) -> None:
    body = {"prompt": "The capital of", "max_tokens": 20, "ignore_eos": True, "temperature": 0}
    with nodes(folder, tmp_path, tp, master) as (first, follower):
        assert len(first.workers()) == 1 + tp // 2, "one for text, and its ranks"
        assert len(follower.workers()) == tp // 2
        with first.client() as http:
            answer = http.post("/v1/completions", json=body).json()
        assert answer["choices"][0]["text"] == expected_text(folder)
        assert first.end() == 0
        assert follower.wait() == 0, "it ends in order with node 0"
        assert first.leftovers() == follower.leftovers() == []


@pytest.mark.parametrize("tp", [2, 4])
def test_an_offline_engine_of_two_nodes_says_what_one_rank_does(
    folder: Path, tmp_path: Path, tp: int, master: str
) -> None:
    with follower_of(folder, tmp_path, tp, master) as follower:
        with LLM(str(folder), tp=tp, nnodes=2, master=master, **SETTINGS) as llm:
            assert llm.generate("The capital of", GREEDY)[0]["text"] == expected_text(folder)
            llm.check_integrity()
        assert follower.wait() == 0
        assert follower.leftovers() == []


@pytest.mark.parametrize("killed", [0, 1])
def test_a_node_that_is_killed_ends_the_other_with_an_error_for_every_request(
    folder: Path, tmp_path: Path, paced: dict[str, str], killed: int, master: str
) -> None:
    body = {"prompt": "a", "ignore_eos": True, "max_tokens": 1500, "stream": True}
    with nodes(folder, tmp_path, 2, master, **paced) as (first, follower):
        with first.client() as http, http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            clock = SpareClock()
            (first, follower)[killed].process.kill()
            if killed == 1:
                last = json.loads(events("\n".join(lines))[-1])
                assert "another rank is gone" in last["error"]["message"]
        assert (follower if killed == 0 else first).wait(PATIENCE_S) == 1
        assert clock.stop() < GONE_S
        assert first.leftovers() == follower.leftovers() == []


@pytest.mark.parametrize("ended", [0, 1])
def test_an_idle_group_notices_that_a_node_is_gone(
    folder: Path, tmp_path: Path, ended: int, master: str
) -> None:
    with nodes(folder, tmp_path, 2, master) as both:
        clock = SpareClock()
        both[ended].process.kill()
        assert both[1 - ended].wait(PATIENCE_S) == 1
        assert clock.stop() < GONE_S
        assert "another rank is gone" in both[1 - ended].log


def test_a_follower_that_is_told_to_stop_ends_the_server(
    folder: Path, tmp_path: Path, master: str
) -> None:
    with nodes(folder, tmp_path, 2, master) as (first, follower):
        assert follower.end(signal.SIGTERM) == 0
        assert first.wait() == 1
        assert follower.leftovers() == []


@pytest.mark.parametrize("is_idle", [False, True])
def test_an_offline_engine_notices_that_a_node_is_gone(
    folder: Path, tmp_path: Path, is_idle: bool, master: str
) -> None:
    with (
        follower_of(folder, tmp_path, 2, master) as follower,
        LLM(str(folder), tp=2, nnodes=2, master=master, **SETTINGS) as llm,
    ):
        follower.wait_for(lambda: "ready: node 1" in follower.log, START_TIMEOUT_S)
        follower.descendants()
        stream = llm.stream([5, 6, 7], ENDLESS)
        clock = SpareClock()
        follower.process.kill()
        if is_idle:
            time.sleep(2.0)
        with pytest.raises(WorkerError, match="another rank is gone"):
            llm.generate([[5, 6, 7]] * 50, ENDLESS)
        assert clock.stop() < GONE_S
        assert list(stream)[-1]["finish_reason"] == "error"
        assert follower.leftovers() == []


def test_nodes_with_other_settings_do_not_start(folder: Path, tmp_path: Path, master: str) -> None:
    with follower_of(folder, tmp_path, 2, master) as follower:
        with pytest.raises(MinisglError, match="another rank is gone"):
            LLM(str(folder), tp=2, nnodes=2, master=master, **{**SETTINGS, "page_size": 8})
        assert follower.wait() == 2
        assert "--page-size 4: node 0 has 8, and all nodes need the same" in follower.log


def test_a_node_that_cannot_start_is_heard_on_the_other(
    tmp_path: Path, folder: Path, master: str
) -> None:
    with (
        follower_of(tmp_path / "no-such-model", tmp_path, 2, master),
        pytest.raises(MinisglError, match="rank 1: .*no-such-model"),
    ):
        LLM(str(folder), tp=2, nnodes=2, master=master, **SETTINGS)


def test_an_llm_lives_on_the_first_node(folder: Path) -> None:
    with pytest.raises(SettingsError, match="--node-rank 1: .* start `minisgl serve`"):
        LLM(str(folder), tp=2, nnodes=2, node_rank=1, master="127.0.0.1:1", **SETTINGS)


def test_flags_that_do_not_fit_end_the_command_with_their_names(folder: Path) -> None:
    command = [sys.executable, "-m", "minisgl", "serve", str(folder), "--tp=3", "--nnodes=2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "--nnodes 2: must divide --tp, which is 3" in done.stderr


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_ends_the_wait_for_nodes_that_do_not_come(folder: Path, master: str) -> None:
    before = set(threading.enumerate())

    def interrupt() -> None:
        wait_for(lambda: is_listening(master), "a store at which the nodes meet")
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, name="interrupt").start()
    with pytest.raises(KeyboardInterrupt):
        LLM(str(folder), tp=2, nnodes=2, master=master, **SETTINGS)
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), f"{thread.name} still waits for the other node"


def is_listening(address: str) -> bool:
    host, _, port = address.partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0
