"""The decoder of Gemma 3, composed of the core's layers."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.core import Batch
from minisgl.layers.attention import Attention
from minisgl.layers.base import BaseOP
from minisgl.layers.embedding import VocabParallelEmbedding
from minisgl.layers.mlp import GatedMLP
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rotary import RopeConfig, RopeStep, RotaryEmbedding
from minisgl.models.contract import ModelBuild
from minisgl_model_gemma3.config_json import LOCAL_ROPE_THETA


class GemmaNorm(RMSNorm):
    """A norm whose checkpoint holds the weight less one."""

    def finalize(self) -> None:
        """Add the one, in place: whoever shares the weight sees it too."""
        self.weight.add_(1.0)


class GemmaAttention(Attention):
    """Attention whose norms of q and k are Gemma's."""

    def finalize(self) -> None:
        """Get ready; as in `GemmaNorm`."""
        super().finalize()
        for norm in (self.q_norm, self.k_norm):
            norm.weight.add_(1.0)


class DecoderLayer(BaseOP):
    """Attention and an MLP, each between two norms and beside the residual stream."""

    def __init__(self, build: ModelBuild, layer_id: int) -> None:
        """Build one layer."""
        size = build.config.hidden_size
        self.input_layernorm = GemmaNorm(build, size)
        self.self_attn = GemmaAttention(build, layer_id)
        self.post_attention_layernorm = GemmaNorm(build, size)
        self.pre_feedforward_layernorm = GemmaNorm(build, size)
        self.mlp = GatedMLP(build)
        self.post_feedforward_layernorm = GemmaNorm(build, size)

    def forward(self, x: Tensor, rope: RopeStep, rows: Tensor | None) -> Tensor:
        """Compute one layer.

        Args:
            x: ``[num_tokens, hidden_size]``, the residual stream.
            rope: This step's rotation for this kind of layer.
            rows: ``[num_rows]`` int64 tokens whose result is wanted; ``None`` for all.

        Returns:
            ``[num_rows, hidden_size]``.
        """
        attended = self.self_attn.forward(self.input_layernorm.forward(x), rope, rows)
        if rows is not None:
            x = x.index_select(0, rows)
        x = x + self.post_attention_layernorm.forward(attended)
        computed = self.mlp.forward(self.pre_feedforward_layernorm.forward(x))
        return x + self.post_feedforward_layernorm.forward(computed)


class Decoder(BaseOP):
    """Scaled embedding, layers and the last norm."""

    def __init__(self, build: ModelBuild) -> None:
        """Build all layers and both rotations."""
        config = build.config
        self.embed_tokens = VocabParallelEmbedding(build)
        self.layers = [DecoderLayer(build, layer_id) for layer_id in range(config.num_layers)]
        self.norm = GemmaNorm(build, config.hidden_size)
        local = RopeConfig(
            rope_type="default",
            theta=config.raw[LOCAL_ROPE_THETA],
            head_dim=config.head_dim,
            max_positions=config.rope.max_positions,
        )
        self.rotary_emb = _rotary(build, config.rope)
        self.rotary_emb_local = _rotary(build, local)
        self._has_window = tuple(window is not None for window in config.windows)
        # Rounded as Hugging Face rounds it.
        self._scale = float(torch.tensor(config.hidden_size**0.5).to(build.dtype))

    def forward(self, batch: Batch) -> Tensor:
        """Return ``[num_rows, hidden_size]``, normed, of the tokens whose logits are wanted."""
        assert batch.input_ids is not None, "the engine sets input_ids before the model runs"
        full, local = self.rotary_emb.forward(), self.rotary_emb_local.forward()
        x = self.embed_tokens.forward(batch.input_ids) * self._scale
        last = len(self.layers) - 1
        for layer_id, (layer, has_window) in enumerate(
            zip(self.layers, self._has_window, strict=True)
        ):
            rows = batch.sample_rows if layer_id == last else None
            x = layer.forward(x, local if has_window else full, rows)
        return self.norm.forward(x)


def _rotary(build: ModelBuild, rope: RopeConfig) -> RotaryEmbedding:
    """Make the table of a rotation, for as many positions as a request may have."""
    num_positions = build.max_seq_len or build.config.context_len
    return RotaryEmbedding(rope, num_positions, build.dtype, build.device, build.kernels)
