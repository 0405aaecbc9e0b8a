"""What every communicator has to do; see `minisgl.distributed.contract`."""

from __future__ import annotations

import multiprocessing
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.testing.comm_loss import RAISED, LossTask, run_until_alone
from minisgl.testing.comm_worker import RankTask, make_communicator, run_rank, use_collectives
from minisgl.testing.selection import TestedBackend

BASE = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]

NOTICE_S = 15.0
"""How soon after a rank's death each call of the others has to end."""


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
    need_devices(backend, size)
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


@pytest.mark.parametrize(
    ("dying", "calls"),
    [
        (1, ("all_reduce", "all_gather", "min_int", "broadcast_bytes")),
        # Nothing limits how long a rank waits for a message of rank 0, so it has to be told.
        (0, ("broadcast_bytes", "min_int", "all_gather", "all_reduce")),
    ],
    ids=["in_a_sum", "waiting_for_a_message"],
)
def test_a_rank_that_is_left_alone_is_told(
    backend: TestedBackend, dying: int, calls: tuple[str, ...], tmp_path: Path
) -> None:
    need_devices(backend, 2)
    tasks = [LossTask(task, dying, calls) for task in rank_tasks(backend, 2, tmp_path)]
    with running(run_until_alone, tasks) as (processes, answers):
        processes[dying].join(timeout=120)
        for name in calls:
            answer = next_answer(answers, name)
            assert answer == RAISED, (
                f"{name} raises CommError when another rank is gone, or raise_if_broken does "
                f"after it; it {answer}"
            )
        next_answer(answers, "shutdown")
        processes[1 - dying].join(timeout=60)
        assert processes[1 - dying].exitcode == 0, "a rank that was left alone ends cleanly"


def next_answer(answers: Queue[tuple[str, str]], name: str) -> str:
    """Return how a call of the rank that is left has ended."""
    try:
        found, answer = answers.get(timeout=NOTICE_S)
    except queue.Empty:
        return f"had not ended {NOTICE_S:g} seconds later"
    assert found == name, f"{found}:\n{answer}"
    return answer


def need_devices(backend: TestedBackend, size: int) -> None:
    if backend.machine.device == "cuda" and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")


def rank_tasks(backend: TestedBackend, size: int, folder: Path) -> list[RankTask]:
    meet = f"file://{folder}/meet"
    return [
        RankTask(backend.spec.factory, rank, size, backend.machine.device, meet)
        for rank in range(size)
    ]


@contextmanager
def running(
    target: Callable[..., None], tasks: Sequence[object]
) -> Iterator[tuple[list[BaseProcess], Queue[Any]]]:  # Any: each target has its own answers
    """Run one process per task, until nobody needs them any more."""
    # What has used CUDA cannot be forked: ranks are forks of a process that only imports torch.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([run_rank.__module__, run_until_alone.__module__])
    answers = context.Queue()
    processes = [context.Process(target=target, args=(task, answers)) for task in tasks]
    for process in processes:
        process.start()
    try:
        yield list(processes), answers
    finally:
        for process in processes:
            process.kill()


def run_ranks(
    backend: TestedBackend, size: int, folder: Path
) -> dict[int, dict[str, Any]]:  # Any: plain data, as in the worker
    """Run one process per rank and collect what each found."""
    found: dict[int, dict[str, Any]] = {}
    with running(run_rank, rank_tasks(backend, size, folder)) as (processes, results):
        while len(found) < size:
            rank, answer = results.get(timeout=120)
            # The other ranks may wait for this one for ever, so look at it first.
            assert "error" not in answer, f"rank {rank} failed:\n{answer['error']}"
            found[rank] = answer
        for process in processes:
            process.join(timeout=60)
            assert process.exitcode == 0, "a process that left the group ends cleanly"
    return found
