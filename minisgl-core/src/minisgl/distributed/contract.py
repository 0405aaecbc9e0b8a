"""The collectives contract: what tensor-parallel layers and the scheduler need of a group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pydantic import BaseModel


@dataclass(frozen=True, slots=True)
class CommConfig:
    """What a communicator is built with.

    Attributes:
        rank: This process's rank in the tensor-parallel group, from 0.
        size: Ranks of the group.
        device: Where tensors live.
        dtype: Of the activations that are reduced.
        init_method: Rendezvous address for ``torch.distributed``, such as ``file:///…`` or
            ``tcp://host:port``; unused when ``size`` is 1.
        timeout_s: How long ranks wait for one another: at the rendezvous, and in each collective
            but `Communicator.broadcast_bytes`.
        settings: The backend's own settings section, or ``None``.
    """

    rank: int
    size: int
    device: torch.device
    dtype: torch.dtype
    init_method: str = ""
    timeout_s: float = 300.0
    settings: BaseModel | None = None


class Communicator(ABC):
    """Collectives of one tensor-parallel group. ``factory(config: CommConfig) -> Communicator``.

    All ranks call the same methods in the same order, and get the same bytes. When a rank is gone,
    the others' calls raise `CommError`, those in progress included.

    Attributes:
        rank: This process's rank.
        size: Ranks of the group.
    """

    rank: int
    size: int

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks. The input may be overwritten; use what is returned."""

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate over ranks along the last dimension, in rank order.

        Args:
            tensor: ``[..., n]``, the same shape on each rank.

        Returns:
            ``[..., size * n]``, contiguous.
        """

    @abstractmethod
    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        """Send control data from rank 0, which passes it; all others pass ``None``.

        The others may wait for it as long as rank 0 has nothing to say.
        """

    @abstractmethod
    def min_int(self, value: int) -> int:
        """Return the smallest ``value`` of any rank, such as the pages that each could hold."""

    @abstractmethod
    def shutdown(self) -> None:
        """Leave the group; safe to call twice."""
