"""A mixture of experts: router, experts in two big tensors, sum over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from minisgl.core import get_global_ctx
from minisgl.layers.base import BaseOP, LoadTarget
from minisgl.layers.linear import ReplicatedLinear
from minisgl.layers.shard import Shard, split_evenly

if TYPE_CHECKING:
    from minisgl.models.contract import ModelBuild


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What checkpoints call the experts that they store one by one.

    Fused tensors, which transformers 5 can write instead, are ``experts.gate_up_proj`` and
    ``experts.down_proj`` of the module ``mlp`` in every architecture.

    Attributes:
        gate: Gate projection.
        up: Up projection.
        down: Down projection.
        module: Module of the layer that holds router and experts.
    """

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    module: str = "mlp"

    def path(self, op: str) -> str:
        """Return the path from ``mlp.<op>`` to the same op of ``module``, with a last dot."""
        return "" if self.module == "mlp" else f"../../{self.module}.{op}."


class Experts(BaseOP):
    """The experts' weights, each rank keeping a slice of every expert.

    Attributes:
        gate_up: ``[num_experts, 2 * intermediate_size, hidden_size]``, gate rows then up rows.
        down: ``[num_experts, hidden_size, intermediate_size]``.
    """

    def __init__(self, build: ModelBuild, names: ExpertNames) -> None:
        """Allocate this rank's slices."""
        config = build.config
        assert config.moe is not None, "the model has experts"
        self._num_experts = config.moe.num_experts
        self._size = config.moe.intermediate_size
        self._hidden_size = config.hidden_size
        self._names = names
        self._shard: Shard = split_evenly(
            "moe_intermediate_size", self._size, build.comm.rank, build.comm.size
        )
        rows = self._shard.size
        self.gate_up = build.empty(self._num_experts, 2 * rows, self._hidden_size)
        self.down = build.empty(self._num_experts, self._hidden_size, rows)

    def own_targets(self) -> Iterator[tuple[str, LoadTarget]]:
        """Yield one tensor per expert and projection, and the fused ones that may replace them."""
        names, rows, kept = self._names, self._shard.size, self._shard.index
        wide, tall = (self._size, self._hidden_size), (self._hidden_size, self._size)
        path, every = names.path("experts"), slice(None)
        gates_and_ups, downs = [], []
        for i in range(self._num_experts):
            gate, up, down = (
                f"{path}{i}.{name}.weight" for name in (names.gate, names.up, names.down)
            )
            yield gate, LoadTarget(self.gate_up[i, :rows], wide, (kept, every))
            yield up, LoadTarget(self.gate_up[i, rows:], wide, (kept, every))
            yield down, LoadTarget(self.down[i], tall, (every, kept))
            gates_and_ups += [gate, up]
            downs.append(down)
        yield from self._fused_targets(tuple(gates_and_ups), tuple(downs))

    def _fused_targets(
        self, gates_and_ups: tuple[str, ...], downs: tuple[str, ...]
    ) -> Iterator[tuple[str, LoadTarget]]:
        """Yield the fused tensors; this rank's gate and up rows are apart in the checkpoint."""
        rows, kept, every = self._shard.size, self._shard.index, slice(None)
        shape = (self._num_experts, 2 * self._size, self._hidden_size)
        for offset, dest in ((0, self.gate_up[:, :rows]), (self._size, self.gate_up[:, rows:])):
            index = (every, slice(offset + kept.start, offset + kept.stop), every)
            yield "gate_up_proj", LoadTarget(dest, shape, index, True, gates_and_ups)
        shape = (self._num_experts, self._hidden_size, self._size)
        yield "down_proj", LoadTarget(self.down, shape, (every, every, kept), True, downs)


class Router(ReplicatedLinear):
    """Scores of the experts."""

    def __init__(self, build: ModelBuild, num_experts: int, path: str) -> None:
        """Allocate ``[num_experts, hidden_size]``; ``path`` leads to the checkpoint's router."""
        super().__init__(build, build.config.hidden_size, num_experts, has_bias=False)
        self._path = path

    def own_targets(self) -> Iterator[tuple[str, LoadTarget]]:
        """Yield ``weight``, and its other name where fused experts stand elsewhere."""
        for name, target in super().own_targets():
            other = f"{self._path}{name}"
            yield other, target
            if other != name:
                yield name, replace(target, is_optional=True, replaces=(other,))


class SparseMLP(BaseOP):
    """The MLP of a sparse layer: each token goes through its ``top_k`` experts."""

    def __init__(self, build: ModelBuild, names: ExpertNames) -> None:
        """Allocate router and experts."""
        assert build.config.moe is not None, "the model has experts"
        self.gate = Router(build, build.config.moe.num_experts, names.path("gate"))
        self.experts = Experts(build, names)
        self._num_ranks = build.comm.size
        self._all_reduce = build.comm.all_reduce

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute ``[num_tokens, hidden_size]`` to the same."""
        y = self.forward_part(x)
        return self._all_reduce(y) if self._num_ranks > 1 else y

    def forward_part(self, x: torch.Tensor) -> torch.Tensor:
        """Do `forward` up to the sum over ranks; see `RowLinear.forward_part`."""
        experts = self.experts
        logits = self.gate.forward(x)  # [num_tokens, num_experts]
        return get_global_ctx().moe_backend.forward(x, logits, experts.gate_up, experts.down)
