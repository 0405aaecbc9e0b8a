"""The decoder that the core's architectures share; each brings its own kind of MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from minisgl.attention.contract import LayerAttention
from minisgl.core import get_global_ctx
from minisgl.layers.attention import Attention
from minisgl.layers.base import BaseOP
from minisgl.layers.embedding import LMHead, VocabParallelEmbedding
from minisgl.layers.mlp import GatedMLP
from minisgl.layers.moe import SparseMLP
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rotary import RopeStep, RotaryEmbedding
from minisgl.layers.shard import split_heads
from minisgl.models.config import ModelConfig
from minisgl.models.contract import Model, ModelBuild
from minisgl.models.families import FAMILIES, GENERIC

BuildMLP = Callable[[ModelBuild, int], GatedMLP | SparseMLP]
"""Makes the MLP of one layer, by layer id."""


class DecoderLayer(BaseOP):
    """Attention and an MLP, each after a norm and beside the residual stream."""

    def __init__(self, build: ModelBuild, layer_id: int, build_mlp: BuildMLP) -> None:
        """Build one layer."""
        self.input_layernorm = RMSNorm(build, build.config.hidden_size)
        self.self_attn = Attention(build, layer_id)
        self.post_attention_layernorm = RMSNorm(build, build.config.hidden_size)
        self.mlp = build_mlp(build, layer_id)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rope: RopeStep,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute one layer.

        Args:
            x: ``[num_tokens, hidden_size]``, the last layer's output, or the embedding; of an
                output each rank has a part, the sum of which is meant.
            residual: ``[num_tokens, hidden_size]`` to add to it; ``None`` in the first layer.
            rope: This step's rotation.
            rows: ``[num_rows]`` int64, in the last layer of a prefill: the tokens whose logits
                are wanted, past attention the only ones that are computed.

        Returns:
            Output and residual, ``[num_rows, hidden_size]`` each; their sum goes on. Of the output
            this is the rank's part.
        """
        if residual is None:
            residual = x
            x = self.input_layernorm.forward(x)
        else:
            x, residual = self.input_layernorm.forward_sum_add(x, residual)
        x = self.self_attn.forward_part(x, rope, rows)
        if rows is not None:
            residual = residual.index_select(0, rows)
        x, residual = self.post_attention_layernorm.forward_sum_add(x, residual)
        return self.mlp.forward_part(x), residual


class Decoder(BaseOP):
    """Embedding, layers and the last norm."""

    def __init__(self, build: ModelBuild, build_mlp: BuildMLP) -> None:
        """Build all layers."""
        config = build.config
        self.embed_tokens = VocabParallelEmbedding(build)
        self.layers = [DecoderLayer(build, i, build_mlp) for i in range(config.num_layers)]
        self.norm = RMSNorm(build, config.hidden_size)
        self.rotary_emb = RotaryEmbedding(
            config.rope,
            build.max_seq_len or config.context_len,
            build.dtype,
            build.device,
            build.kernels,
        )

    def forward(self) -> torch.Tensor:
        """Return ``[num_rows, hidden_size]``, normed, of the tokens whose logits are wanted."""
        batch = get_global_ctx().batch
        assert batch.input_ids is not None, "the engine sets input_ids before the model runs"
        rope = self.rotary_emb.forward()
        x = self.embed_tokens.forward(batch.input_ids)
        residual = None
        for layer in self.layers[:-1]:
            x, residual = layer.forward(x, residual, rope)
        x, residual = self.layers[-1].forward(x, residual, rope, batch.sample_rows)
        return self.norm.forward_sum_add(x, residual)[0]


class DecoderModel(Model):
    """A decoder and its head: every architecture of the core, but for its MLP."""

    def __init__(self, build: ModelBuild) -> None:
        """Allocate the parameters of this rank.

        Raises:
            ModelError: The model cannot be cut over that many ranks.
        """
        config = build.config
        heads = split_heads(
            config.num_qo_heads, config.num_kv_heads, build.comm.rank, build.comm.size
        )
        self.num_qo_heads = heads.q.size
        self.num_kv_heads = heads.kv.size
        self.head_dim = config.head_dim
        self.vocab_size = config.vocab_size
        self.layers_attention = _layers_attention(config)
        self.model = Decoder(build, self.build_mlp)
        self.lm_head = LMHead(build, self.model.embed_tokens if config.has_tied_head else None)

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:  # Any: free-form JSON
        """Return a small config.json; see `Model.tiny_config`."""
        family = FAMILIES.get(cls.__name__, GENERIC)
        return {
            "model_type": family.model_type,
            "vocab_size": 131,  # odd, so that ranks have padding
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "tie_word_embeddings": False,
            **family.tiny,
        }

    def build_mlp(self, build: ModelBuild, layer_id: int) -> GatedMLP | SparseMLP:
        """Make the MLP of a layer; a dense one unless an architecture says otherwise."""
        return GatedMLP(build)

    def forward(self) -> torch.Tensor:
        """Compute the active batch; see `Model.forward`."""
        return self.lm_head.forward(self.model.forward())


def _layers_attention(config: ModelConfig) -> tuple[LayerAttention, ...]:
    """Give each layer its scale and window; a window counts the query itself."""
    scale = config.head_dim**-0.5
    return tuple(
        LayerAttention(scale, -1 if window is None else window - 1) for window in config.windows
    )
