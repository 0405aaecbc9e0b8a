"""Ranks in threads, each with a simulated device, and memory that all of them write."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from minisgl_kernels_cuda.peer_reduce import Limits, PeerGroup, PeerReduce, memory_bytes
from tests.cuda_sim.simulator import SimulatedLoader

T = TypeVar("T")
ALL = Limits(1 << 30, 1 << 30)


class PeerRanks:
    """The kernels of each rank of a group."""

    def __init__(
        self,
        folder: Path,
        num_ranks: int,
        dtype: torch.dtype,
        limits: Limits = ALL,
        timeout_s: float = 60.0,
    ) -> None:
        self.memories = [
            torch.zeros(memory_bytes(num_ranks), dtype=torch.uint8) for _ in range(num_ranks)
        ]
        self.verdicts = [torch.zeros(2, dtype=torch.int32) for _ in range(num_ranks)]
        addresses = tuple(memory.data_ptr() for memory in self.memories)
        self.kernels = [
            PeerReduce(
                SimulatedLoader(folder, rank),
                dtype,
                PeerGroup(rank, addresses, self.verdicts[rank].data_ptr(), timeout_s),
                limits,
            )
            for rank in range(num_ranks)
        ]

    def run(self, work: Callable[[PeerReduce, int], T]) -> list[T]:
        """Do something on all ranks at the same time."""
        ranks = range(len(self.kernels))
        with ThreadPoolExecutor(len(self.kernels)) as threads:
            return list(threads.map(work, self.kernels, ranks))


def sum_in_order(parts: list[Tensor]) -> Tensor:
    """Add in float32 by rank, as the kernels do, and round once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)
