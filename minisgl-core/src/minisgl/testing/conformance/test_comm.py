"""What every communicator has to do; see `minisgl.distributed.contract`."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.testing.comm_worker import RankTask, make_communicator, run_rank, use_collectives
from minisgl.testing.selection import TestedBackend

BASE = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_a_group_of_one_needs_no_rendezvous(backend: TestedBackend) -> None:
    task = RankTask(backend.spec.factory, 0, 1, backend.machine.device, init_method="")
    comm = make_communicator(task)
    found = use_collectives(comm, task)
    comm.shutdown()
    comm.shutdown()
    assert found["rank"] == (0, 1), "rank and size are those of the config"
    assert found["sum"] == BASE, "the sum over one rank is its own tensor"
    assert found["gathered"] == BASE, "one rank gathers its own tensor"
    assert found["min"] == 50, "the smallest value of one rank is its own"
    assert found["bytes_100000"], "rank 0 gets its own payload back"


@pytest.mark.parametrize("size", [2])
def test_ranks_agree(backend: TestedBackend, size: int, tmp_path: Path) -> None:
    if backend.machine.device == "cuda" and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    found = run_ranks(backend, size, tmp_path)
    total = sum(range(size)) * 100
    for rank in range(size):
        mine = found[rank]
        assert mine["rank"] == (rank, size), "rank and size are those of the config"
        assert mine["sum"] == [[size * x + total for x in row] for row in BASE], (
            "all_reduce returns the sum over ranks"
        )
        assert mine["gathered"] == [[x + 10 * r for r in range(size) for x in y] for y in BASE], (
            "all_gather concatenates along the last dimension, in rank order"
        )
        assert mine["is_contiguous"], "all_gather returns a contiguous tensor"
        assert mine["gathered_1d"] == [x + r for r in range(size) for x in BASE[0]], (
            "all_gather takes tensors of one dimension"
        )
        assert mine["min"] == 50 - 7 * (size - 1), "min_int returns the smallest value"
        assert mine["bytes_0"], "broadcast_bytes sends an empty payload"
        assert mine["bytes_1"], "broadcast_bytes sends a short payload"
        assert mine["bytes_100000"], "broadcast_bytes sends a long payload"
        assert mine["large"] == [sum(range(1, size + 1))], "all_reduce sums every element"
        # float32: numbers of up to ten, added and normed in another order.
        assert (mine["fused"] or 0.0) < 1e-4, (
            "all_reduce_add_norm returns the norm of the ranks' sum and the residual, and that sum"
        )


def run_ranks(
    backend: TestedBackend, size: int, folder: Path
) -> dict[int, dict[str, Any]]:  # Any: plain data, as in the worker
    """Run one process per rank and collect what each found."""
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    tasks = [
        RankTask(backend.spec.factory, rank, size, backend.machine.device, f"file://{folder}/meet")
        for rank in range(size)
    ]
    processes = [spawn.Process(target=run_rank, args=(task, results)) for task in tasks]
    for process in processes:
        process.start()
    found: dict[int, dict[str, Any]] = {}
    try:
        while len(found) < size:
            rank, answer = results.get(timeout=120)
            # The other ranks may wait for this one for ever, so look at it first.
            assert "error" not in answer, f"rank {rank} failed:\n{answer['error']}"
            found[rank] = answer
        for process in processes:
            process.join(timeout=60)
            assert process.exitcode == 0, "a process that left the group ends cleanly"
    finally:
        for process in processes:
            process.kill()
    return found
