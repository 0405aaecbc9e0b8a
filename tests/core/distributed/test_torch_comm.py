"""torch's process groups, with the ranks in threads: nothing in them is per process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from minisgl.distributed.contract import CommConfig, Communicator
from minisgl.distributed.meeting import call_off_meeting
from minisgl.distributed.torch_comm import build_communicator
from minisgl.errors import CommError

Result = TypeVar("Result")
CPU = torch.device("cpu")


def config_for(folder: Path, rank: int, size: int, timeout_s: float = 30.0) -> CommConfig:
    return CommConfig(rank, size, CPU, torch.float32, f"file://{folder}/meet", timeout_s)


def on_ranks(
    folder: Path, size: int, work: Callable[[Communicator], Result], timeout_s: float = 30.0
) -> list[Result]:
    def run(rank: int) -> Result:
        comm = build_communicator(config_for(folder, rank, size, timeout_s))
        try:
            return work(comm)
        finally:
            comm.shutdown()

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_gets_the_same_bits(size: int, tmp_path: Path) -> None:
    def work(comm: Communicator) -> list[bytes]:
        generator = torch.Generator().manual_seed(comm.rank)
        found = []
        for shape in ((1, 64), (3, 7), (129, 576)):
            tensor = torch.randn(shape, generator=generator)
            found.append(comm.all_gather(tensor).numpy().tobytes())
            found.append(comm.all_reduce(tensor).numpy().tobytes())
        return found

    results = on_ranks(tmp_path, size, work)
    assert all(result == results[0] for result in results)


def test_messages_of_any_length_arrive(tmp_path: Path) -> None:
    lengths = (0, 1, 503, 504, 505, 512, 1016, 100_000)

    def work(comm: Communicator) -> list[bytes]:
        sent = [bytes(i % 251 for i in range(n)) if comm.rank == 0 else None for n in lengths]
        return [comm.broadcast_bytes(payload) for payload in sent]

    first, second = on_ranks(tmp_path, 2, work)
    assert first == second == [bytes(i % 251 for i in range(n)) for n in lengths]


def test_two_groups_live_in_one_process(tmp_path: Path) -> None:
    def work(comm: Communicator) -> int:
        (tmp_path / "inner").mkdir(exist_ok=True)
        config = config_for(tmp_path / "inner", comm.rank, 2)
        other = build_communicator(config)
        return comm.min_int(5 + comm.rank) + other.min_int(100 - comm.rank)

    assert on_ranks(tmp_path, 2, work) == [104, 104]


def test_ranks_that_do_not_come_are_named(tmp_path: Path) -> None:
    with pytest.raises(CommError, match="rank 1 waited for ranks that did not come: 0, 2"):
        build_communicator(config_for(tmp_path, 1, 3, timeout_s=0.2))


def test_a_meeting_can_be_called_off(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(build_communicator, config_for(tmp_path, 0, 2))
        while not (tmp_path / "meet").exists():
            pass
        call_off_meeting(f"file://{tmp_path}/meet", "rank 1 has no memory")
        with pytest.raises(CommError, match="rank 1 has no memory"):
            waiting.result(timeout=5)


def test_a_rank_that_leaves_makes_the_others_fail(tmp_path: Path) -> None:
    def work(comm: Communicator) -> str:
        comm.min_int(1)
        if comm.rank == 1:
            return "left"
        with pytest.raises(CommError, match="another rank is gone") as caught:
            comm.all_reduce(torch.ones(3))
        assert "third_party" not in str(caught.value), "the message is for users"
        return "noticed"

    # It leaves in order, and no process ends: that is noticed by nothing but the time limit.
    assert on_ranks(tmp_path, 2, work, timeout_s=5.0) == ["noticed", "left"]
