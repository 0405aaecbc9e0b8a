"""The architecture ``Gemma3ForCausalLM``.

What sets it apart from Llama: embeddings are scaled by the root of the hidden size; norms multiply
by one plus their weight and stand before and behind attention and MLP; the heads of q and k are
normed; five of six layers see a window of keys and rotate by another base; scores are scaled by a
number of the configuration.

Source: Gemma 3 Technical Report, arXiv:2503.19786, and Hugging Face's modelling code for what it
leaves open.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minisgl.attention.contract import LayerAttention
from minisgl.core import get_global_ctx
from minisgl.layers.embedding import LMHead
from minisgl.layers.shard import split_heads
from minisgl.models.contract import Model, ModelBuild
from minisgl_model_gemma3.decoder import Decoder


class Gemma3ForCausalLM(Model):
    """The decoder and its head, which is the unscaled embedding in all released models."""

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
        scale = float(config.raw["query_pre_attn_scalar"]) ** -0.5
        self.layers_attention = tuple(
            LayerAttention(scale, -1 if window is None else window - 1) for window in config.windows
        )
        self.model = Decoder(build)
        self.lm_head = LMHead(build, self.model.embed_tokens if config.has_tied_head else None)
        self._soft_cap: float | None = config.raw.get("final_logit_softcapping")

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:  # Any: JSON
        """Return the config.json that the conformance suite builds; see the contract."""
        return {
            "model_type": "gemma3_text",
            "vocab_size": 131,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "query_pre_attn_scalar": 40,
            "max_position_embeddings": 128,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
        }

    def forward(self) -> Tensor:
        """Compute the active batch; see `Model.forward`."""
        batch = get_global_ctx().batch
        logits = self.lm_head.forward(self.model.forward(batch))
        if self._soft_cap is None:
            return logits
        return torch.tanh(logits / self._soft_cap) * self._soft_cap
