"""The gated MLP of a dense layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from minisgl.layers.base import BaseOP
from minisgl.layers.linear import GateUpLinear, RowLinear
from minisgl.layers.shard import split_evenly

if TYPE_CHECKING:
    from minisgl.models.contract import ModelBuild


class GatedMLP(BaseOP):
    """``down(act(gate(x)) * up(x))``, the intermediate dimension cut over ranks."""

    def __init__(self, build: ModelBuild) -> None:
        """Take sizes, biases and activation from the configuration."""
        config = build.config
        size = config.intermediate_size
        shard = split_evenly("intermediate_size", size, build.comm.rank, build.comm.size)
        self.gate_up_proj = GateUpLinear(build, size, config.has_mlp_bias)
        self.down_proj = RowLinear(build, size, shard, config.has_mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute ``[num_tokens, hidden_size]`` to the same."""
        return self.down_proj.forward(self.gate_up_proj.forward(x))

    def forward_part(self, x: torch.Tensor) -> torch.Tensor:
        """Do `forward` up to the sum over ranks; see `RowLinear.forward_part`."""
        return self.down_proj.forward_part(self.gate_up_proj.forward(x))
