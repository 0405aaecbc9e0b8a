"""One rank of a communicator under test, in a process of its own."""

from __future__ import annotations

import importlib
import traceback
from dataclasses import dataclass
from multiprocessing.queues import Queue
from typing import Any

import torch

from minisgl.distributed.contract import CommConfig, Communicator


@dataclass(frozen=True, slots=True)
class RankTask:
    """What a rank is told.

    Attributes:
        factory: ``package.module:attribute``.
        rank: Its rank.
        size: Ranks of the group.
        device: ``"cpu"`` or ``"cuda"``.
        init_method: Where the ranks meet.
    """

    factory: str
    rank: int
    size: int
    device: str
    init_method: str

    def torch_device(self) -> torch.device:
        """Return where this rank's tensors live."""
        return torch.device("cuda", self.rank) if self.device == "cuda" else torch.device("cpu")


def make_communicator(task: RankTask) -> Communicator:
    """Build the communicator of a rank."""
    module, _, attribute = task.factory.partition(":")
    device = task.torch_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    config = CommConfig(
        rank=task.rank,
        size=task.size,
        device=device,
        dtype=torch.float32,
        init_method=task.init_method,
        timeout_s=60.0,
    )
    made: Communicator = getattr(importlib.import_module(module), attribute)(config)
    return made


def run_rank(task: RankTask, results: Queue[tuple[int, dict[str, Any]]]) -> None:
    """Use every collective and send what came back; the entry point of a process."""
    try:
        comm = make_communicator(task)
        found = use_collectives(comm, task)
        comm.shutdown()
        comm.shutdown()
    except Exception:
        results.put((task.rank, {"error": traceback.format_exc()}))
        raise
    results.put((task.rank, found))


def use_collectives(comm: Communicator, task: RankTask) -> dict[str, Any]:  # Any: plain data
    """Call each collective with data that tells ranks apart.

    Returns:
        Plain lists, bytes and numbers by what was asked.
    """
    device = task.torch_device()
    base = torch.arange(6, dtype=torch.float32, device=device).reshape(2, 3)
    # A view whose last dimension is not all of its rows: ranks may pass slices of bigger tensors.
    sliced = torch.full((2, 8), -1.0, device=device)[:, 2:5]
    sliced.copy_(base + 10 * task.rank)
    gathered = comm.all_gather(sliced)
    found = {
        "rank": (comm.rank, comm.size),
        "sum": comm.all_reduce(base + 100 * task.rank).tolist(),
        "gathered": gathered.tolist(),
        "is_contiguous": gathered.is_contiguous(),
        "gathered_1d": comm.all_gather(base[0] + task.rank).tolist(),
        "min": comm.min_int(50 - 7 * task.rank),
    }
    for size in (0, 1, 100_000):
        payload = bytes(range(256)) * (size // 256 + 1)
        sent = payload[:size] if task.rank == 0 else None
        found[f"bytes_{size}"] = comm.broadcast_bytes(sent) == payload[:size]
    large = torch.full((300, 1000), float(task.rank + 1), device=device)
    found["large"] = comm.all_reduce(large).unique().tolist()
    found["fused"] = _use_fused(comm, device)
    comm.raise_if_broken()
    return found


def _use_fused(comm: Communicator, device: torch.device) -> float | None:
    """Return how far the fused op is from the separate ones, or ``None`` where it does not serve.

    Rows of 64 numbers are small enough for any backend that has the op.
    """
    if comm.all_reduce_add_norm is None:
        return None
    x = torch.linspace(-2.0, 3.0, 192, device=device).reshape(3, 64) * (comm.rank + 1)
    residual = torch.linspace(1.0, -1.0, 192, device=device).reshape(3, 64)
    weight = torch.linspace(0.5, 1.5, 64, device=device)
    total = comm.all_reduce(x.clone()) + residual
    expected = torch.nn.functional.rms_norm(total, (64,), weight, 1e-6)
    done = comm.all_reduce_add_norm(x, residual, weight, 1e-6)
    if done is None:
        return None
    return max(float((a - b).abs().max()) for a, b in zip(done, (expected, total), strict=True))
