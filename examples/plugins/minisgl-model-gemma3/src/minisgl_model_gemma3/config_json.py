"""What Gemma 3's config.json says, in the fields that the core reads.

Defaults are those of Hugging Face's ``Gemma3TextConfig``: what equals them may be left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minisgl.errors import ModelError

LOCAL_ROPE_THETA = "local_rope_theta"
"""Field for the base of the rotation in layers with a window, which the core has no word for."""

_DEFAULTS: Mapping[str, Any] = {  # Any: JSON
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}
_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
_REFUSED = ("attn_logit_softcapping", "use_bidirectional_attention")


def adapt_config(config: Mapping[str, Any]) -> Mapping[str, Any]:  # Any: JSON
    """Rewrite a config.json.

    Raises:
        ModelError: It asks for something that no Gemma 3 text model has.
    """
    for key in _REFUSED:
        if config.get(key):
            raise ModelError(f"config.json: {key} {config[key]!r} is not supported")
    given = {**_DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
    rope, local_theta = _rotations(given)
    dropped = ("rope_theta", "rope_scaling", "rope_local_base_freq")
    return {key: value for key, value in given.items() if key not in dropped} | {
        "hidden_act": given["hidden_activation"],
        "use_qk_norm": True,
        "use_sliding_window": True,
        "layer_types": given.get("layer_types") or _layer_types(given),
        "rope_parameters": rope,
        LOCAL_ROPE_THETA: local_theta,
    }


def _layer_types(config: Mapping[str, Any]) -> list[str]:  # Any: JSON
    """Return the kinds of layers where only the pattern is given: every sixth sees all keys."""
    pattern = config["sliding_window_pattern"]
    return [
        "full_attention" if (i + 1) % pattern == 0 else "sliding_attention"
        for i in range(config["num_hidden_layers"])
    ]


def _rotations(config: Mapping[str, Any]) -> tuple[dict[str, Any], float]:  # Any: JSON
    """Return the rotation of full layers, and the base of the one in layers with a window.

    transformers 5 writes both into ``rope_parameters``; before, they had fields of their own.
    """
    nested = config.get("rope_parameters") or {}
    full = {"rope_theta": config.get("rope_theta", _GLOBAL_THETA)}
    full |= config.get("rope_scaling") or {}
    full |= nested.get("full_attention") or {}
    local = {"rope_theta": config.get("rope_local_base_freq", _LOCAL_THETA)}
    local |= nested.get("sliding_attention") or {}
    if local.get("rope_type", "default") != "default":
        raise ModelError(
            f"config.json: rope type {local['rope_type']!r} in layers with a window is not "
            "supported; supported: default"
        )
    return full, float(local["rope_theta"])
