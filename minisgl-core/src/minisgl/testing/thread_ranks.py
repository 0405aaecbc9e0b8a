"""Tensor-parallel ranks as threads of one process, for tests of what each rank computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from minisgl.distributed.contract import Communicator

T = TypeVar("T")


class ThreadComm(Communicator):
    """One rank of a group whose members are threads; a member that fails ends them all.

    Attributes:
        num_all_reduces: Calls of `all_reduce` so far.
    """

    def __init__(
        self, rank: int, barrier: threading.Barrier, slots: list[torch.Tensor | None]
    ) -> None:
        """Take what the group shares."""
        self.rank = rank
        self.size = len(slots)
        self.num_all_reduces = 0
        self._barrier = barrier
        self._slots = slots

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks."""
        self.num_all_reduces += 1
        return torch.stack(self._exchange(tensor)).sum(dim=0)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate over ranks along the last dimension."""
        return torch.cat(self._exchange(tensor), dim=-1)

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        """Refuse: models send no control data."""
        raise NotImplementedError("models send no control data")

    def min_int(self, value: int) -> int:
        """Refuse: models agree on no sizes."""
        raise NotImplementedError("models agree on no sizes")

    def shutdown(self) -> None:
        """Do nothing."""

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._slots[self.rank] = tensor
        self._barrier.wait()
        everyone = [slot.clone() for slot in self._slots if slot is not None]
        self._barrier.wait()
        return everyone


def run_ranks(num_ranks: int, work: Callable[[ThreadComm], T]) -> list[T]:
    """Run ``work`` once per rank, all at the same time, and return the results in rank order."""
    barrier = threading.Barrier(num_ranks, timeout=60)
    slots: list[torch.Tensor | None] = [None] * num_ranks

    def run(rank: int) -> T:
        try:
            return work(ThreadComm(rank, barrier, slots))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(num_ranks) as pool:
        futures = [pool.submit(run, rank) for rank in range(num_ranks)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    # What the others raise because one has failed explains nothing.
    for error in sorted(errors, key=lambda each: isinstance(each, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
