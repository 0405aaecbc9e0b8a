"""What Hugging Face's configuration classes mean where a config.json is silent.

A checkpoint's JSON leaves out what equals the default of its class, and some options are not in
the JSON at all because the class hard-codes them (Qwen2 has q/k/v biases, whatever the file says).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture's fixed traits and defaults.

    Attributes:
        model_type: Its ``model_type`` in config.json.
        defaults: Values of fields that config.json may leave out; what is not named here is
            required, or derived.
        qkv_bias: Whether q, k and v have biases; ``None``: ``attention_bias`` decides.
        o_bias: The same for the output projection.
        mlp_bias: The same for the MLP, by ``mlp_bias``.
        has_qk_norm: Whether the heads of q and k are normed, by ``use_qk_norm``.
        window: When ``sliding_window`` counts: ``"never"``, ``"always"``, or ``"flagged"``, with
            ``use_sliding_window``.
        window_start: Where no ``layer_types`` are given and the window is flagged, only layers
            from ``max_window_layers`` on have it; else all have.
        moe: Spelling of the expert fields, or ``None`` for a dense model.
        tiny: Fields of the conformance suite's small model that set the architecture apart.
    """

    model_type: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)  # JSON scalars of any type
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    mlp_bias: bool | None = None
    has_qk_norm: bool | None = False
    window: Literal["never", "always", "flagged"] = "never"
    window_start: bool = True
    moe: Literal["qwen", "mixtral"] | None = None
    tiny: Mapping[str, Any] = field(default_factory=dict)  # JSON of any type


GENERIC = Family(has_qk_norm=None, window="flagged")
"""For architectures of other distributions: the options in the JSON decide."""

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family(
            model_type="llama",
            defaults={"max_position_embeddings": 2048},
            tiny={"attention_bias": True, "mlp_bias": True},
        ),
        "MistralForCausalLM": Family(
            model_type="mistral",
            defaults={
                "max_position_embeddings": 131072,
                "num_key_value_heads": 8,
                "sliding_window": 4096,
            },
            qkv_bias=False,
            o_bias=False,
            mlp_bias=False,
            window="always",
            tiny={"sliding_window": 20},
        ),
        "Qwen2ForCausalLM": Family(
            model_type="qwen2",
            defaults={
                "max_position_embeddings": 32768,
                "num_key_value_heads": 32,
                "sliding_window": 4096,
                "max_window_layers": 28,
            },
            qkv_bias=True,
            o_bias=False,
            mlp_bias=False,
            window="flagged",
            tiny={"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
        ),
        "Qwen3ForCausalLM": Family(
            model_type="qwen3",
            defaults={
                "max_position_embeddings": 32768,
                "num_key_value_heads": 32,
                "head_dim": 128,
                "sliding_window": 4096,
                "max_window_layers": 28,
            },
            mlp_bias=False,
            has_qk_norm=True,
            window="flagged",
            tiny={"head_dim": 32, "attention_bias": True},
        ),
        "Qwen3MoeForCausalLM": Family(
            model_type="qwen3_moe",
            defaults={
                "max_position_embeddings": 32768,
                "num_key_value_heads": 4,
                "sliding_window": 4096,
                "moe_intermediate_size": 768,
                "num_experts": 128,
                "num_experts_per_tok": 8,
            },
            mlp_bias=False,
            has_qk_norm=True,
            window="flagged",
            window_start=False,
            moe="qwen",
            tiny={
                "head_dim": 32,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 48,
                "mlp_only_layers": [1],
                "norm_topk_prob": True,
            },
        ),
        "MixtralForCausalLM": Family(
            model_type="mixtral",
            defaults={
                "max_position_embeddings": 131072,
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-5,
                "rope_theta": 1000000.0,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
            },
            qkv_bias=False,
            o_bias=False,
            mlp_bias=False,
            window="always",
            moe="mixtral",
            tiny={"num_local_experts": 4, "sliding_window": 20},
        ),
    }
)
"""The architectures of the core, by their Hugging Face class name."""
