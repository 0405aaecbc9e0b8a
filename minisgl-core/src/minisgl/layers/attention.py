"""Self-attention: the projections around what the attention backend does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from minisgl.core import get_global_ctx
from minisgl.layers.base import BaseOP, LoadTarget
from minisgl.layers.linear import QKVLinear, RowLinear
from minisgl.layers.norm import RMSNorm
from minisgl.layers.shard import Shard, split_heads
from minisgl.ops.contract import QKVInputs

if TYPE_CHECKING:
    from minisgl.layers.rotary import RopeStep
    from minisgl.models.contract import ModelBuild


class Attention(BaseOP):
    """Causal self-attention of one layer over the KV pool."""

    def __init__(self, build: ModelBuild, layer_id: int) -> None:
        """Take this rank's heads; norms and biases as the configuration says."""
        config = build.config
        heads = split_heads(
            config.num_qo_heads, config.num_kv_heads, build.comm.rank, build.comm.size
        )
        self.qkv_proj = QKVLinear(build, heads)
        columns = Shard(
            heads.q.start * config.head_dim,
            heads.q.size * config.head_dim,
            heads.q.num_real * config.head_dim,
        )
        self.o_proj = RowLinear(
            build, config.num_qo_heads * config.head_dim, columns, config.has_o_bias
        )
        if config.has_qk_norm:
            self.q_norm = RMSNorm(build, config.head_dim)
            self.k_norm = RMSNorm(build, config.head_dim)
        self._q_norm_weight = self.q_norm.weight if config.has_qk_norm else None
        self._k_norm_weight = self.k_norm.weight if config.has_qk_norm else None
        self._layer_id = layer_id
        self._num_qo_heads = heads.q.size
        self._num_kv_heads = heads.kv.size
        self._head_dim = config.head_dim
        self._eps = config.rms_norm_eps
        self._qk_norm_rope_store = build.kernels.qk_norm_rope_store

    def own_targets(self) -> Iterator[tuple[str, LoadTarget]]:
        """Yield the rotation's frequencies, which old checkpoints hold and nobody reads."""
        yield "rotary_emb.inv_freq", LoadTarget(None, is_optional=True)

    def forward(
        self, x: torch.Tensor, rope: RopeStep, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend.

        Args:
            x: ``[num_tokens, hidden_size]``, normed.
            rope: This step's rotation.
            rows: ``[num_rows]`` int64 tokens whose result is wanted; ``None`` for all.

        Returns:
            ``[num_rows, hidden_size]``.
        """
        return self.o_proj.forward(self._attend(x, rope, rows))

    def forward_part(
        self, x: torch.Tensor, rope: RopeStep, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Do `forward` up to the sum over ranks; see `RowLinear.forward_part`."""
        return self.o_proj.forward_part(self._attend(x, rope, rows))

    def _attend(self, x: torch.Tensor, rope: RopeStep, rows: torch.Tensor | None) -> torch.Tensor:
        """Return what the heads have gathered: ``[num_rows, num_qo_heads * head_dim]``."""
        ctx = get_global_ctx()
        batch = ctx.batch
        pool = ctx.kv_pool
        assert batch.out_loc is not None, "the engine sets out_loc before the model runs"
        inputs = QKVInputs(
            self._num_qo_heads,
            self._num_kv_heads,
            self._head_dim,
            self._q_norm_weight,
            self._k_norm_weight,
            self._eps,
            rope.positions,
            rope.cos_sin_cache,
            pool.k_slots(self._layer_id),
            pool.v_slots(self._layer_id),
            batch.out_loc,
            rope.rows,
        )
        q = self._qk_norm_rope_store(self.qkv_proj.forward(x), inputs)
        attended = ctx.attn_backend.forward(q, self._layer_id, batch)
        if rows is not None:
            attended = attended.index_select(0, rows)
        return attended.flatten(1)
