"""Nodes with networks of their own, which reach each other over one cable."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from minisgl import LLM, SamplingParams
from tests.server.server_process import START_TIMEOUT_S, ServerProcess
from tests.tiny_models import TinyModel
from tests.tp.spare_clock import PATIENCE_S
from tests.tp.two_hosts import NEAR, TwoHosts

pytestmark = pytest.mark.slow

MASTER = f"{NEAR}:29500"  # a network of its own: every port is free
FLAGS = ("--tp=2", "--nnodes=2", "--node-rank=1", f"--master={MASTER}")
SCRIPT = f"""
import sys
from minisgl import LLM, SamplingParams
from minisgl.errors import WorkerError
def main():
    sizes = dict(dtype="float32", num_page_override=600, page_size=4)
    llm = LLM(sys.argv[1], tp=2, nnodes=2, master="{MASTER}", **sizes)
    text = llm.generate("The capital of", SamplingParams(max_tokens=20, ignore_eos=True))[0]["text"]
    print(repr(text), flush=True)
    if sys.stdin.readline() == "end\\n":
        llm.shutdown()
    else:
        try:
            llm.generate([[5, 6, 7]] * 1000, SamplingParams(max_tokens=1500, ignore_eos=True))
        except WorkerError as error:
            print(error)
if __name__ == "__main__":
    main()
"""


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with TwoHosts() as hosts:
        if hosts.failure:
            pytest.skip(f"no network namespaces here: {hosts.failure}")
        yield hosts


@pytest.fixture(scope="module")
def folder(model_folder: Callable[[str, TinyModel], Path]) -> Path:
    spec = TinyModel("llama", num_heads=8, num_kv_heads=2, max_positions=2048)
    return model_folder("long context", spec)


@contextmanager
def offline_engine(
    hosts: TwoHosts, folder: Path, tmp_path: Path
) -> Iterator[tuple[subprocess.Popen[str], ServerProcess]]:
    """An LLM on the near host and the server that follows it on the far one."""
    script = tmp_path / "near.py"
    script.write_text(SCRIPT)
    flags = (*FLAGS, "--dtype=float32", "--num-pages=600", "--page-size=4")
    with (
        ServerProcess(folder, tmp_path, *flags, prefix=hosts.far) as follower,
        subprocess.Popen(
            [*hosts.near, sys.executable, str(script), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as near,
    ):
        try:
            follower.wait_for(lambda: "ready: node 1 of 2" in follower.log, START_TIMEOUT_S)
            yield near, follower
        finally:
            near.kill()


def test_nodes_of_two_networks_say_what_one_rank_does(
    hosts: TwoHosts, folder: Path, tmp_path: Path
) -> None:
    with LLM(str(folder), dtype="float32", num_page_override=600, page_size=4) as llm:
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        (expected,) = llm.generate("The capital of", params)
    with offline_engine(hosts, folder, tmp_path) as (near, follower):
        answer, _ = near.communicate("end\n", PATIENCE_S)
        assert answer == f"{expected['text']!r}\n"
        assert near.returncode == 0
        assert follower.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_cable_that_is_cut_ends_both_nodes(
    hosts: TwoHosts, folder: Path, tmp_path: Path, is_idle: bool
) -> None:
    with offline_engine(hosts, folder, tmp_path) as (near, follower):
        assert near.stdin is not None
        assert near.stdout is not None
        near.stdout.readline()
        if not is_idle:
            near.stdin.write("go on\n")
            near.stdin.flush()
        hosts.unplug()
        assert follower.wait(PATIENCE_S) == 1
        assert "another rank is gone" in follower.log
        answer, _ = near.communicate("go on\n" if is_idle else None, PATIENCE_S)
        assert "another rank is gone" in answer
