"""Linear layers, cut by output (column parallel) or by input (row parallel).

A checkpoint's separate projections of one input (q, k, v; gate, up) are one parameter here: the
loader writes each to its own rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from minisgl.layers.base import BaseOP, LoadTarget
from minisgl.layers.shard import HeadShard, Shard, split_evenly

if TYPE_CHECKING:
    from minisgl.models.contract import ModelBuild
    from minisgl.ops.contract import PackedLinear


class Linear(BaseOP):
    """A weight, an optional bias, and the packed form that multiplies.

    Subclasses say where their rows come from. ``weight`` is dropped by `finalize` when its packed
    form does not read it.
    """

    _packed: PackedLinear

    def __init__(
        self, build: ModelBuild, in_features: int, out_features: int, has_bias: bool
    ) -> None:
        """Allocate ``[out_features, in_features]``, the sizes being those of this rank."""
        self.weight: torch.Tensor | None = build.empty(out_features, in_features)
        self.bias = build.empty(out_features) if has_bias else None
        self._pack_linear = build.kernels.pack_linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply ``[num_tokens, in_features]`` to ``[num_tokens, out_features]``."""
        return self._packed(x)

    def finalize(self) -> None:
        """Pack the weight; let go of the original where the packed form does not need it."""
        assert self.weight is not None, "finalize is called once"
        self._packed = self._pack_linear(self.weight, self.bias)
        if not self._packed.is_original_needed:
            self.weight = None


class ReplicatedLinear(Linear):
    """The whole weight on each rank; the router of a mixture of experts."""

    def own_targets(self) -> Iterator[tuple[str, LoadTarget]]:
        """Yield ``weight``."""
        assert self.weight is not None, "weights are loaded before finalize"
        yield "weight", LoadTarget(self.weight, tuple(self.weight.shape), (slice(None),) * 2)


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint projection inside a merged weight.

    Attributes:
        name: Of the checkpoint module, beside the merged op.
        num_rows: Rows in the checkpoint.
        shard: Rows that this rank keeps.
    """

    name: str
    num_rows: int
    shard: Shard


class MergedColumnLinear(Linear):
    """Several projections of one input, each cut by output, stacked by rows."""

    def __init__(
        self, build: ModelBuild, in_features: int, parts: Sequence[Part], has_bias: bool
    ) -> None:
        """Allocate the rows of all parts."""
        super().__init__(build, in_features, sum(p.shard.size for p in parts), has_bias)
        self._in_features = in_features
        self._parts = tuple(parts)

    def own_targets(self) -> Iterator[tuple[str, LoadTarget]]:
        """Yield weight and bias of each part, as siblings of this op."""
        assert self.weight is not None, "weights are loaded before finalize"
        row = 0
        for part in self._parts:
            end = row + part.shard.size
            yield (
                f"../{part.name}.weight",
                LoadTarget(
                    self.weight[row:end],
                    (part.num_rows, self._in_features),
                    (part.shard.index, slice(None)),
                ),
            )
            if self.bias is not None:
                target = LoadTarget(self.bias[row:end], (part.num_rows,), (part.shard.index,))
                yield f"../{part.name}.bias", target
            row = end


class QKVLinear(MergedColumnLinear):
    """The q, k and v projections: ``[num_tokens, (num_qo + 2 * num_kv) * head_dim]``."""

    def __init__(self, build: ModelBuild, heads: HeadShard) -> None:
        """Take sizes and biases from the model's configuration."""
        config = build.config
        parts = [
            _head_part("q_proj", config.num_qo_heads, heads.q, config.head_dim),
            _head_part("k_proj", config.num_kv_heads, heads.kv, config.head_dim),
            _head_part("v_proj", config.num_kv_heads, heads.kv, config.head_dim),
        ]
        super().__init__(build, config.hidden_size, parts, config.has_qkv_bias)


class GateUpLinear(MergedColumnLinear):
    """The gate and up projections of an MLP and what joins them: ``act(gate(x)) * up(x)``.

    Its result is ``[num_tokens, intermediate_size]``, the size being that of this rank.
    """

    def __init__(self, build: ModelBuild, intermediate_size: int, has_bias: bool) -> None:
        """Cut the intermediate dimension over the ranks."""
        shard = split_evenly(
            "intermediate_size", intermediate_size, build.comm.rank, build.comm.size
        )
        parts = [Part(name, intermediate_size, shard) for name in ("gate_proj", "up_proj")]
        super().__init__(build, build.config.hidden_size, parts, has_bias)
        pack = build.kernels.pack_gated_linear
        self._pack_linear = partial(pack, activation=build.config.activation)


class RowLinear(Linear):
    """Cut by input; the ranks' partial products are summed. Rank 0 alone adds the bias."""

    def __init__(self, build: ModelBuild, in_features: int, shard: Shard, has_bias: bool) -> None:
        """Keep the columns ``shard`` of ``in_features``."""
        is_first = build.comm.rank == 0
        super().__init__(build, shard.size, build.config.hidden_size, has_bias and is_first)
        self._in_features = in_features
        self._shard = shard
        self._has_bias = has_bias
        self._num_ranks = build.comm.size
        self._all_reduce = build.comm.all_reduce

    def own_targets(self) -> Iterator[tuple[str, LoadTarget]]:
        """Yield the weight, and the bias even where another rank adds it."""
        assert self.weight is not None, "weights are loaded before finalize"
        out_features = self.weight.shape[0]
        index = (slice(None), self._shard.index)
        yield "weight", LoadTarget(self.weight, (out_features, self._in_features), index)
        if self._has_bias:
            yield "bias", LoadTarget(self.bias, (out_features,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply ``[num_tokens, shard.size]`` to ``[num_tokens, out_features]``, all ranks'."""
        y = self.forward_part(x)
        return self._all_reduce(y) if self._num_ranks > 1 else y

    def forward_part(self, x: torch.Tensor) -> torch.Tensor:
        """Do `forward` up to the sum over ranks, for whoever sums together with what follows."""
        return self._packed(x)


def _head_part(name: str, num_heads: int, shard: Shard, head_dim: int) -> Part:
    """Turn heads into rows."""
    rows = Shard(shard.start * head_dim, shard.size * head_dim, shard.num_real * head_dim)
    return Part(name, num_heads * head_dim, rows)
