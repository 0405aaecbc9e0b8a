"""The collectives contract: what tensor-parallel layers and the scheduler need of a group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

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
        on_lost: Called at most once, from any thread, when a rank is found to be gone while nobody
            needs to be waiting for it; for launchers that do not see all ranks' processes.
    """

    rank: int
    size: int
    device: torch.device
    dtype: torch.dtype
    init_method: str = ""
    timeout_s: float = 300.0
    settings: BaseModel | None = None
    on_lost: Callable[[], None] | None = None


class AllReduceAddNorm(Protocol):
    """A sum over ranks together with the residual add and the norm that follow it."""

    def __call__(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """Return the norm of the ranks' ``x`` and ``residual`` summed up, and that sum.

        It is what ``fused_add_rms_norm`` makes of ``all_reduce(x)``, and may overwrite both inputs.

        Args:
            x: ``[num_tokens, hidden_size]``, this rank's part of the sum.
            residual: The same shape, the same on all ranks.
            weight: ``[hidden_size]`` of the norm.
            eps: Of the norm.

        Returns:
            ``None``, with nothing changed, where the two are better done one after the other. All
            ranks get the same answer: it depends on shapes and dtypes alone.
        """


class Communicator(ABC):
    """Collectives of one tensor-parallel group. ``factory(config: CommConfig) -> Communicator``.

    All ranks call the same methods in the same order, and get the same bytes. When a rank is gone,
    the others' calls raise `CommError`, those in progress included; where these have been submitted
    to a GPU, they end, and `raise_if_broken` raises.

    Attributes:
        rank: This process's rank.
        size: Ranks of the group.
    """

    rank: int
    size: int

    @property
    def all_reduce_add_norm(self) -> AllReduceAddNorm | None:
        """The fused op of this backend, or ``None``; asked for once, when a model is built."""
        return None

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks. The input may be overwritten; use what is returned."""

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> Tensor:
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

    def raise_if_broken(self) -> None:
        """Find out whether collectives that were submitted have not done their work.

        On a GPU a collective is only submitted by its call. The scheduler asks here before it
        believes what a step has computed. A backend that raises at the call has nothing to add.

        Raises:
            CommError: Another rank is gone; results since the last time are worthless.
        """
        return

    @abstractmethod
    def shutdown(self) -> None:
        """Leave the group; safe to call twice."""
