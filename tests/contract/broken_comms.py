"""Communicators with one fault each."""

from __future__ import annotations

import threading

import torch

from minisgl.distributed.contract import AllReduceAddNorm, CommConfig
from minisgl.distributed.torch_comm import TorchCommunicator
from minisgl.errors import CommError


class KeepsItsPart(TorchCommunicator):
    """Sums into a copy and returns its own."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        super().all_reduce(tensor.clone())
        return tensor


class GathersBackwards(TorchCommunicator):
    """The last rank comes first."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = super().all_gather(tensor).chunk(self.size, dim=-1)
        return torch.cat(parts[::-1], dim=-1)


class ReturnsAView(TorchCommunicator):
    """What is gathered is not contiguous."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        wide = super().all_gather(tensor)
        return torch.stack((wide, wide), dim=-1)[..., 0]


class TakesTheLargest(TorchCommunicator):
    """Agrees on what the richest rank has."""

    def min_int(self, value: int) -> int:
        return -super().min_int(-value)


class CutsLongMessages(TorchCommunicator):
    """Has room for 4096 bytes."""

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        return super().broadcast_bytes(None if payload is None else payload[:4096])


class CountsFromOne(TorchCommunicator):
    """Calls the first rank 1."""

    def __init__(self, config: CommConfig) -> None:
        super().__init__(config)
        self.rank += 1


class FusesWithoutTheResidual(TorchCommunicator):
    """Norms the sum over ranks alone."""

    @property
    def all_reduce_add_norm(self) -> AllReduceAddNorm:
        return self._fused

    def _fused(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = self.all_reduce(x)
        normed = torch.nn.functional.rms_norm(total, (total.shape[-1],), weight, eps)
        return normed, total + residual


class CarriesOnAlone(TorchCommunicator):
    """Takes its own part for the sum when nobody else is there."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        try:
            return super().all_reduce(tensor)
        except CommError:
            return tensor


class SaysItInOtherWords(TorchCommunicator):
    """Raises an error that no caller knows."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        try:
            return super().all_reduce(tensor)
        except CommError as error:
            raise ConnectionError(str(error)) from error


class WaitsForTheDead(TorchCommunicator):
    """Does not see that nobody will send anything any more."""

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        try:
            return super().broadcast_bytes(payload)
        except CommError:
            threading.Event().wait()
            raise
