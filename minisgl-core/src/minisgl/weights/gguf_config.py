"""The Hugging Face configuration that a GGUF file's metadata describes.

Key names are those of the GGUF specification; what a rope-scaling key means is taken from
llama.cpp's behaviour. Norms, shapes and ties are read off the tensor table, which cannot lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf.constants import LlamaFileType

from minisgl.errors import ModelError
from minisgl.weights.gguf_file import GGUFFile, MetaValue

END_TOKENS = (
    "<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>",
    "<end_of_turn>", "<｜end▁of▁sentence｜>", "</s>",
)  # fmt: skip
"""Control tokens that end a turn or a text wherever they occur; many files name only one of them
as their end of sequence."""

_CONTROL_TOKEN = 3
_UNSET = object()


@dataclass(frozen=True, slots=True)
class _Family:
    """How one GGUF architecture is called and configured at Hugging Face."""

    architecture: str
    model_type: str
    has_permuted_qk: bool = False


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", "llama", has_permuted_qk=True),
    "mixtral": _Family("MixtralForCausalLM", "mixtral", has_permuted_qk=True),
    "mistral": _Family("MistralForCausalLM", "mistral", has_permuted_qk=True),
    "qwen2": _Family("Qwen2ForCausalLM", "qwen2"),
    "qwen3": _Family("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": _Family("Qwen3MoeForCausalLM", "qwen3_moe"),
}


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """What a GGUF file says about its model.

    Attributes:
        config: As ``config.json`` would have it.
        generation_config: As ``generation_config.json`` would have it.
        has_permuted_qk: Whether the rows of q and k are in the order for interleaved rope.
    """

    config: dict[str, Any]  # free-form JSON
    generation_config: dict[str, Any]  # free-form JSON
    has_permuted_qk: bool


def read_model_metadata(file: GGUFFile) -> GGUFModel:
    """Translate the metadata.

    Raises:
        ModelError: The architecture is not one that we run, or a needed key is missing.
    """
    arch = str(file.metadata.get("general.architecture", "unnamed"))
    keys = _Keys(file, arch)
    family = _find_family(arch, keys)
    config = _dimensions(keys) | {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "hidden_act": "silu",
        "vocab_size": _shape(file, "token_embd.weight")[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "rope_theta": keys.get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(keys),
    }
    if (dtype := _stored_dtype(file)) is not None:
        config["torch_dtype"] = dtype
    if keys.get("expert_count", 0):
        config |= _experts(keys, family)
    window = keys.get("attention.sliding_window", None)
    config["sliding_window"] = window
    if family.model_type.startswith("qwen"):
        config |= {"use_sliding_window": window is not None, "max_window_layers": 0}
    generation = _generation(file)
    return GGUFModel(config | generation, generation, family.has_permuted_qk)


class _Keys:
    """Looks up an architecture's own keys."""

    def __init__(self, file: GGUFFile, arch: str) -> None:
        self.file = file
        self.arch = arch

    def get(self, key: str, default: MetaValue = _UNSET) -> MetaValue:
        """Return the value of ``ARCH.key``; one without a default is needed."""
        value = self.file.metadata.get(f"{self.arch}.{key}", default)
        if value is _UNSET:
            raise ModelError(f"{self.file.path}: metadata has no {self.arch}.{key}")
        if isinstance(value, list):  # one number per layer
            if len(set(value)) != 1:
                raise ModelError(
                    f"{self.file.path}: {self.arch}.{key} differs between layers, which no "
                    "supported architecture has"
                )
            value = value[0]
        return value


def _find_family(arch: str, keys: _Keys) -> _Family:
    """Tell the architectures apart that share a GGUF name."""
    if arch == "llama" and keys.get("expert_count", 0):
        return _FAMILIES["mixtral"]
    if arch == "llama" and keys.get("attention.sliding_window", None):
        return _FAMILIES["mistral"]
    if arch not in _FAMILIES:
        supported = ", ".join(sorted({*_FAMILIES} - {"mistral", "mixtral"}))
        raise ModelError(
            f"{keys.file.path}: GGUF architecture {arch!r} is not supported; supported: {supported}"
        )
    return _FAMILIES[arch]


def _dimensions(keys: _Keys) -> dict[str, Any]:
    """Return the sizes; numbers of several types."""
    num_heads = keys.get("attention.head_count")
    num_kv_heads = keys.get("attention.head_count_kv", num_heads)
    rows = _shape(keys.file, "blk.0.attn_q.weight")[0]
    return {
        "hidden_size": keys.get("embedding_length"),
        "intermediate_size": keys.get("feed_forward_length", 0),
        "num_hidden_layers": keys.get("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": rows // num_heads,
        "max_position_embeddings": keys.get("context_length"),
        "rms_norm_eps": _shortest_decimal(keys.get("attention.layer_norm_rms_epsilon")),
    }


def _experts(keys: _Keys, family: _Family) -> dict[str, Any]:
    """Return the mixture-of-experts fields."""
    count, used = keys.get("expert_count"), keys.get("expert_used_count")
    fields = {"num_experts_per_tok": used, "num_local_experts": count}
    if family.model_type == "qwen3_moe":
        fields |= {
            "num_experts": count,
            "moe_intermediate_size": keys.get("expert_feed_forward_length"),
            "norm_topk_prob": True,  # what llama.cpp computes for this architecture
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return fields


def _rope_scaling(keys: _Keys) -> dict[str, Any] | None:
    """Return the rope-scaling section, or ``None`` for plain rope."""
    tensors = keys.file.tensors
    context = keys.get("context_length")
    original = keys.get("rope.scaling.original_context_length", context)
    if "rope_freqs.weight" in tensors:
        # Llama 3's frequency factors, spelled out. Longrope divides each frequency by a factor
        # of its own too, so it reproduces them exactly whatever their origin.
        factors = _floats(keys.file, "rope_freqs.weight")
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": original,
        }
    if "rope_factors_long.weight" in tensors:
        scaling = {
            "rope_type": "longrope",
            "short_factor": _floats(keys.file, "rope_factors_short.weight"),
            "long_factor": _floats(keys.file, "rope_factors_long.weight"),
            "factor": context / original,
            "original_max_position_embeddings": original,
        }
        return scaling | _attention_factor(keys)
    kind = keys.get("rope.scaling.type", "none")
    factor = _shortest_decimal(keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 1.0)))
    if kind == "yarn":
        scaling = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": keys.get("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": keys.get("rope.scaling.yarn_beta_slow", 1.0),
        }
        return scaling | _attention_factor(keys)
    if kind in ("none", "linear"):
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
    raise ModelError(
        f"{keys.file.path}: {keys.arch}.rope.scaling.type {kind!r}; known: none, linear, yarn, "
        "and longrope with its factor tensors"
    )


def _attention_factor(keys: _Keys) -> dict[str, float]:
    """Return the attention factor where the file sets one; otherwise it follows from the rest."""
    factor = keys.get("rope.scaling.attn_factor", None)
    return {} if factor is None else {"attention_factor": float(factor)}


def _generation(file: GGUFFile) -> dict[str, Any]:
    """Return begin, end and padding ids, as far as the file has them."""
    meta = file.metadata
    fields: dict[str, Any] = {}  # ids and lists of ids
    for name, key in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        if (token_id := meta.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            fields[name] = token_id
    eos = [meta.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    tokens, types = meta.get("tokenizer.ggml.tokens", []), meta.get("tokenizer.ggml.token_type", [])
    eos += [
        i
        for i, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == _CONTROL_TOKEN and token in END_TOKENS
    ]
    unique = [i for i in dict.fromkeys(eos) if i is not None]
    if unique:
        fields["eos_token_id"] = unique
    return fields


def _stored_dtype(file: GGUFFile) -> str | None:
    """Return the dtype of an unquantised file; a quantised one has none of its own."""
    names = {
        LlamaFileType.ALL_F32: "float32",
        LlamaFileType.MOSTLY_F16: "float16",
        LlamaFileType.MOSTLY_BF16: "bfloat16",
    }
    return names.get(file.metadata.get("general.file_type", -1))


def _shape(file: GGUFFile, name: str) -> tuple[int, ...]:
    if name not in file.tensors:
        raise ModelError(f"{file.path}: tensor {name} is missing")
    return file.tensors[name].shape


def _floats(file: GGUFFile, name: str) -> list[float]:
    """Read a small float32 tensor."""
    tensor = file.tensors[name]
    return [float(x) for x in file.read_rows(name, 0, tensor.num_rows).view(np.float32).ravel()]


def _shortest_decimal(value: float) -> float:
    """Undo the trip of a decimal number through float32, so that 1e-5 is 1e-5 again."""
    return float(str(np.float32(value)))
