"""Ranks of several machines: where they meet, and how they notice that one is gone."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from minisgl.config.load import Settings
from minisgl.distributed.contract import CommConfig, Communicator
from minisgl.distributed.meeting import (
    call_off_meeting,
    kept_folder,
    own_address,
    split_address,
)
from minisgl.distributed.peers import PeerWatch, attempt
from minisgl.distributed.torch_comm import build_communicator
from minisgl.engine.agreement import check_nodes_agree
from minisgl.errors import CommError, SettingsError
from minisgl.message.folder import SocketFolder
from minisgl.plugin.manager import PluginManager

Result = TypeVar("Result")
CPU = torch.device("cpu")
SOON_S = 10.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


def config_for(port: int, rank: int, size: int = 2, **changes: Any) -> CommConfig:
    place = f"tcp://127.0.0.1:{port}"
    return CommConfig(rank, size, CPU, torch.float32, place, **({"timeout_s": 30.0} | changes))


def on_ranks(size: int, work: Callable[[Communicator], Result]) -> list[Result]:
    port = free_port()

    def run(rank: int) -> Result:
        comm = build_communicator(config_for(port, rank, size))
        try:
            return work(comm)
        finally:
            comm.shutdown()

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


def test_ranks_meet_at_a_port() -> None:
    def work(comm: Communicator) -> tuple[list[float], bytes]:
        sent = b"hello" if comm.rank == 0 else None
        return comm.all_reduce(torch.full((2,), comm.rank + 1.0)).tolist(), comm.broadcast_bytes(
            sent
        )

    assert on_ranks(3, work) == [([6.0, 6.0], b"hello")] * 3


def test_a_node_that_never_comes_is_named_with_the_flag() -> None:
    port = free_port()
    with pytest.raises(CommError, match=f"--master 127.0.0.1:{port}: node 0 is not there"):
        build_communicator(config_for(port, 1, timeout_s=0.5))


def test_a_taken_port_is_named_with_the_flag() -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CommError, match=f"--master 127.0.0.1:{port}: cannot listen there"):
            build_communicator(config_for(port, 0, timeout_s=0.5))


def test_a_name_that_does_not_resolve_is_refused_at_once() -> None:
    config = CommConfig(1, 2, CPU, torch.float32, "tcp://no-such-host.invalid:1", 3600.0)
    with pytest.raises(CommError, match="--master no-such-host.invalid:1: cannot be reached"):
        build_communicator(config)


def test_ranks_that_do_not_come_to_a_port_are_named() -> None:
    with pytest.raises(CommError, match="rank 0 waited for ranks that did not come: 1, 2"):
        build_communicator(config_for(free_port(), 0, 3, timeout_s=0.3))


def test_a_meeting_at_a_port_can_be_called_off() -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(build_communicator, config_for(port, 0))
        while not waiting.done():
            call_off_meeting(f"tcp://127.0.0.1:{port}", "rank 1: no such model")
        with pytest.raises(CommError, match="the ranks do not meet: rank 1: no such model"):
            waiting.result(timeout=SOON_S)


def test_addresses_of_version_6_have_brackets() -> None:
    assert split_address("tcp://[::1]:29500") == ("::1", 29500)


def test_ranks_of_one_machine_use_the_loopback() -> None:
    assert own_address("file:///anywhere") == "127.0.0.1"


def test_the_end_of_a_connection_is_the_end_of_a_rank() -> None:
    ours, theirs = socket.socketpair()
    lost = threading.Event()
    watch = PeerWatch([], lost.set, [ours])
    theirs.close()
    assert lost.wait(SOON_S)
    watch.close()


def test_the_end_of_a_process_is_noticed() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    lost = threading.Event()
    watch = PeerWatch([process.pid], lost.set)
    process.kill()
    assert lost.wait(SOON_S)
    watch.close()
    process.communicate()


def test_a_process_that_has_ended_before_is_noticed() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    lost = threading.Event()
    PeerWatch([process.pid], lost.set)
    assert lost.wait(SOON_S)


def test_ranks_that_end_together_do_not_miss_each_other() -> None:
    ours, theirs = socket.socketpair()
    lost = threading.Event()
    watch = PeerWatch([], lost.set, [ours])
    theirs.close()
    watch.close()
    assert not lost.wait(2.0)


def test_what_does_not_end_is_left_to_itself() -> None:
    end = threading.Event()
    assert attempt(lambda: None, SOON_S)
    assert not attempt(lambda: assert_ends(end), 0.05)
    end.set()


def assert_ends(end: threading.Event) -> None:
    assert end.wait(SOON_S)


def load(**settings: Any) -> Settings:
    given = {"model": "m", "tp": 2, "nnodes": 2, "master": "127.0.0.1:1", **settings}
    return PluginManager.bootstrap(env={}).load_settings(given)


def test_nodes_with_other_settings_are_refused_with_the_flag() -> None:
    settings = [load(page_size=16), load(page_size=32, node_rank=1)]

    def work(comm: Communicator) -> str:
        try:
            check_nodes_agree(comm, settings[comm.rank], torch.float32)
        except SettingsError as error:
            return str(error)
        return ""

    assert on_ranks(2, work) == [
        "",
        "--page-size 32: node 0 has 16, and all nodes need the same",
    ]


def test_what_a_node_has_of_its_own_may_differ() -> None:
    settings = [load(device="cpu"), load(device="auto", node_rank=1, memory_ratio=0.5)]

    def work(comm: Communicator) -> None:
        check_nodes_agree(comm, settings[comm.rank], torch.float32)

    assert on_ranks(2, work) == [None, None]


@pytest.mark.timeout(30)
def test_a_rank_that_comes_when_all_is_over_gives_up_at_once(tmp_path: Path) -> None:
    place = f"file://{tmp_path}/gone/rendezvous"
    config = CommConfig(1, 2, CPU, torch.float32, place, timeout_s=1.0)
    with pytest.raises(CommError, match="do not meet: .*gone is gone"):
        build_communicator(config)


def test_a_folder_stays_while_its_rendezvous_is_being_opened() -> None:
    folder = SocketFolder()
    with ThreadPoolExecutor(1) as threads:
        with kept_folder(folder.path):
            removed = threads.submit(folder.remove)
            assert wait([removed], timeout=0.3).not_done
            assert folder.path.exists()
        removed.result(timeout=SOON_S)
    assert not folder.path.exists()


def test_a_meeting_that_is_over_cannot_be_called_off(tmp_path: Path) -> None:
    call_off_meeting(f"file://{tmp_path}/gone/rendezvous", "too late")
    assert not list(tmp_path.iterdir())
