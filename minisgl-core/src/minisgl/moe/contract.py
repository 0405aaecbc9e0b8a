"""The mixture-of-experts contract."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pydantic import BaseModel


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """What a MoE backend is built with; one backend serves all layers.

    The KV pool is sized afterwards, so it leaves room for what a backend allocates at once.

    Attributes:
        num_experts: Experts of a layer.
        top_k: Experts of a token.
        hidden_size: Width of the input and output.
        intermediate_size: Width of one expert on this rank.
        is_renormalized: Whether the k routing weights of a token are scaled to sum to 1.
        dtype: Of activations and weights.
        device: Where everything lives.
        max_num_tokens: Most tokens of a step.
        settings: The backend's own settings section, or ``None``.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    is_renormalized: bool
    dtype: torch.dtype
    device: torch.device
    max_num_tokens: int
    settings: BaseModel | None = None


class MoEBackend(ABC):
    """Routes tokens to experts and sums what the experts make of them.

    ``factory(config: MoEConfig) -> MoEBackend``. Experts are SwiGLU:
    ``down(silu(gate(x)) * up(x))``. With tensor parallelism each rank holds a slice of the
    intermediate dimension and the layer all-reduces the result.
    """

    @abstractmethod
    def forward(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        gate_up_weight: torch.Tensor,
        down_weight: torch.Tensor,
    ) -> torch.Tensor:
        """Compute one MoE layer.

        The routing weights are the softmax of ``router_logits`` over all experts in float32, the
        ``top_k`` largest of each token, divided by their sum when ``is_renormalized``. Capturable
        in a CUDA graph unless the backend's probe says otherwise.

        Args:
            hidden_states: ``[num_tokens, hidden_size]``; not changed. The last layer has no token
                in a chunk of a prompt that samples nothing.
            router_logits: ``[num_tokens, num_experts]``, of any float dtype.
            gate_up_weight: ``[num_experts, 2 * intermediate_size, hidden_size]``; rows of an
                expert are its gate projection, then its up projection.
            down_weight: ``[num_experts, hidden_size, intermediate_size]``.

        Returns:
            ``[num_tokens, hidden_size]`` of the input's dtype.
        """
