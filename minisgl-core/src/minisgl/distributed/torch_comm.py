"""Collectives through ``torch.distributed``: gloo between CPU processes, NCCL between GPUs."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from minisgl.distributed.contract import CommConfig, Communicator


class SingleCommunicator(Communicator):
    """The group of one: nothing to communicate."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor."""
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor."""
        return tensor

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        """Return the payload."""
        assert payload is not None, "rank 0 passes the payload"
        return payload

    def min_int(self, value: int) -> int:
        """Return the value."""
        return value

    def shutdown(self) -> None:
        """Do nothing."""


class TorchCommunicator(Communicator):
    """A ``torch.distributed`` process group; control data always goes over gloo."""

    def __init__(self, config: CommConfig) -> None:
        """Meet the other ranks.

        Raises:
            RuntimeError: They did not all come within ``config.timeout_s``.
        """
        self.rank, self.size = config.rank, config.size
        backend = "cpu:gloo,cuda:nccl" if config.device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            init_method=config.init_method,
            rank=config.rank,
            world_size=config.size,
            timeout=timedelta(seconds=config.timeout_s),
        )

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place."""
        dist.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate over ranks along the last dimension."""
        tensor = tensor.contiguous()
        parts = tensor.new_empty((self.size, *tensor.shape))
        dist.all_gather(list(parts.unbind(0)), tensor)  # [size, ..., n]
        return parts.movedim(0, -2).flatten(-2)  # [..., size * n]

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        """Send bytes from rank 0 over gloo, length first."""
        size = torch.tensor([0 if payload is None else len(payload)], dtype=torch.int64)
        dist.broadcast(size, src=0)
        data = torch.empty(int(size), dtype=torch.uint8)
        if payload:
            data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        dist.broadcast(data, src=0)
        return bytes(data.numpy())

    def min_int(self, value: int) -> int:
        """Reduce over gloo."""
        tensor = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
        return int(tensor)

    def shutdown(self) -> None:
        """Destroy the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def build_communicator(config: CommConfig) -> Communicator:
    """Build the communicator for ``config.size`` ranks."""
    return SingleCommunicator() if config.size == 1 else TorchCommunicator(config)
