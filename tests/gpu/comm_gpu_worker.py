"""One rank of a communicator on a GPU: what it computes, eagerly and in graphs."""

from __future__ import annotations

import importlib
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minisgl.distributed.contract import CommConfig, Communicator
from minisgl.errors import CommError
from tests.kernels_cuda.reference import make, rms_norm

EPS = 1e-6
SIZES = (8, 1000, 5120, 40_960, 200_008, 1 << 20, 3 << 20, 6 << 20)  # elements
ROWS = (1, 3, 64, 300)
HIDDEN = 5120
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LATE_S = 2.0


@dataclass(frozen=True)
class CommTask:
    """A rank, and the file at which it meets the others."""

    factory: str
    rank: int
    size: int
    meeting: str
    dtype: torch.dtype = torch.bfloat16
    is_lost: bool = False


def run(task: CommTask, results: Any) -> None:  # Any: a queue
    """Do everything and report; the entry point of a process."""
    try:
        comm = make_comm(task)
        with torch.inference_mode():
            found = lose_a_rank(comm, task) if task.is_lost else check_all(comm, task)
        comm.shutdown()
    except Exception:  # noqa: BLE001  # it is sent to the test
        results.put((task.rank, {"error": traceback.format_exc()}))
    else:
        results.put((task.rank, found))
    results.close()
    results.join_thread()
    os._exit(0)


def make_comm(task: CommTask) -> Communicator:
    device = torch.device("cuda", task.rank)
    torch.cuda.set_device(device)
    module, _, name = task.factory.partition(":")
    config = CommConfig(task.rank, task.size, device, task.dtype, task.meeting, 30.0)
    comm: Communicator = getattr(importlib.import_module(module), name)(config)
    return comm


def check_all(comm: Communicator, task: CommTask) -> dict[str, Any]:
    found: dict[str, Any] = {"has_fused": comm.all_reduce_add_norm is not None}
    found["wrong_sums"] = [
        (str(dtype), n) for dtype in DTYPES for n in SIZES if not sum_is_right(comm, task, dtype, n)
    ]
    found["wrong_gathers"] = [rows for rows in ROWS if not gather_is_right(comm, task, rows)]
    found["wrong_norms"] = [rows for rows in ROWS if not norm_is_right(comm, task, rows)]
    found["wrong_replays"] = count_wrong_replays(comm, task)
    found["uneven"] = not survives_late_ranks(comm, task)
    comm.raise_if_broken()
    return found


def parts(task: CommTask, n: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Return the same on every rank: what each of them adds."""
    return [make(n, dtype=dtype, seed=97 * seed + rank).cuda() for rank in range(task.size)]


def sum_of(terms: list[Tensor]) -> Tensor:
    total = terms[0].float()
    for term in terms[1:]:
        total = total + term.float()
    return total.to(terms[0].dtype)


def sum_is_right(comm: Communicator, task: CommTask, dtype: torch.dtype, n: int) -> bool:
    """Two terms are rounded once, in whatever order; more may differ by one place."""
    terms = parts(task, n, dtype, n % 89)
    out, expected = comm.all_reduce(terms[task.rank].clone()), sum_of(terms)
    if task.size == 2:
        return torch.equal(out, expected)
    return torch.allclose(out.float(), expected.float(), rtol=2**-6, atol=2**-6)


def gather_is_right(comm: Communicator, task: CommTask, rows: int) -> bool:
    terms = [part.view(rows, 96) for part in parts(task, rows * 96, torch.bfloat16, 5)]
    return torch.equal(comm.all_gather(terms[task.rank]), torch.cat(terms, dim=-1))


def norm_is_right(comm: Communicator, task: CommTask, rows: int) -> bool:
    terms = [part.view(rows, HIDDEN) for part in parts(task, rows * HIDDEN, task.dtype, 6)]
    residual = make(rows, HIDDEN, dtype=task.dtype, seed=7).cuda()
    weight = make(HIDDEN, dtype=task.dtype, seed=8).cuda()
    total = sum_of(terms) + residual
    fused = comm.all_reduce_add_norm
    done = fused and fused(terms[task.rank].clone(), residual.clone(), weight, EPS)
    if not done:
        return fused is None or rows > 64  # large ones may be left to the separate ops
    expected = rms_norm(total, weight, EPS).float()
    close = torch.allclose(done[0].float(), expected, rtol=2**-6, atol=2**-6)
    return close and (task.size > 2 or torch.equal(done[1], total))


def chain(comm: Communicator, inputs: list[Tensor], weight: Tensor) -> list[Tensor]:
    """A step's collectives: small and large sums, fused and not, and a gather."""
    outputs = []
    for x in inputs:
        y = comm.all_reduce(x.clone())
        z = comm.all_reduce(y * 0.5)
        rows = z[: z.numel() // HIDDEN * HIDDEN].view(-1, HIDDEN)
        fused = comm.all_reduce_add_norm
        if fused is not None and rows.shape[0]:
            done = fused(rows * 0.25, rows.clone(), weight, EPS)
            outputs += [] if done is None else list(done)
        outputs += [z, comm.all_gather(z[:64].view(1, 64))]
    return outputs


def count_wrong_replays(comm: Communicator, task: CommTask) -> int:
    """Capture a chain and replay it on new inputs, with eager calls in between."""
    sizes = (HIDDEN, 8 * HIDDEN, 64, 1 << 20, 4 << 20, 3 * HIDDEN)
    fixed = [torch.zeros(n, dtype=task.dtype, device="cuda") for n in sizes]
    weight = make(HIDDEN, dtype=task.dtype, seed=8).cuda()
    stream = torch.cuda.Stream()
    num_wrong = 0
    with torch.cuda.stream(stream):
        chain(comm, fixed, weight)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = chain(comm, fixed, weight)
        for seed in range(12):
            new = [
                make(n, dtype=task.dtype, seed=seed * 31 + task.rank + i).cuda()
                for i, n in enumerate(sizes)
            ]
            for x, value in zip(fixed, new, strict=True):
                x.copy_(value)
            for _ in range(1 + seed % 3):
                graph.replay()
            eager = chain(comm, new, weight)
            stream.synchronize()
            num_wrong += sum(not torch.equal(a, b) for a, b in zip(captured, eager, strict=True))
    del graph  # before the communicator: NCCL waits for graphs
    return num_wrong


def survives_late_ranks(comm: Communicator, task: CommTask) -> bool:
    """Whether sums are right when ranks come one after another."""
    terms = parts(task, 4096, torch.bfloat16, 11)
    time.sleep(0.2 * task.rank)
    first = comm.all_reduce(terms[task.rank].clone())
    torch.cuda.synchronize()
    time.sleep(0.2 * (task.size - task.rank))
    second = comm.all_reduce(terms[task.rank].clone())
    return torch.equal(first, second)


def lose_a_rank(comm: Communicator, task: CommTask) -> dict[str, Any]:
    """Let the last rank die while the others' GPUs wait for it; they tell how long they did."""
    x = torch.ones(HIDDEN, dtype=task.dtype, device="cuda")
    large = torch.ones(32 << 20, dtype=task.dtype, device="cuda")
    calls: list[Callable[[], Tensor]] = [lambda: comm.all_reduce(x), lambda: comm.all_reduce(large)]
    for call in calls:
        call()
    torch.cuda.synchronize()
    if task.rank == task.size - 1:
        time.sleep(LATE_S)
        os._exit(9)
    started = time.monotonic()
    message = ""
    try:
        for call in calls:
            call()
        torch.cuda.synchronize()
        comm.raise_if_broken()
    except CommError as error:
        message = str(error)
    return {"waited_s": time.monotonic() - started, "message": message}
