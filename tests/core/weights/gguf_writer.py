"""Writes Hugging Face models and tokenizers as GGUF files, the way llama.cpp converts them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

GGUF_ARCH = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}
_EXPERTS = {
    "gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps",
}  # fmt: skip


def save_gguf(
    path: Path,
    config: dict[str, Any],
    weights: dict[str, torch.Tensor],
    tokenizer: PreTrainedTokenizerFast | None = None,
    qtype: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    extra: dict[str, Any] | None = None,
    raw_tensors: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType | None]] | None = None,
) -> None:
    """Write a model; ``weights`` by the names of a checkpoint, experts one by one.

    ``qtype`` is for matrices whose width it divides; ``extra`` adds metadata by full key, ``ARCH``
    standing for the architecture; ``raw_tensors`` are written as they are, under GGUF names.
    """
    arch = GGUF_ARCH[config["model_type"]]
    writer = gguf.GGUFWriter(path, arch)
    _write_config(writer, arch, config, extra or {})
    if tokenizer is not None:
        _write_tokenizer(writer, tokenizer)
    raw_tensors = raw_tensors or {}
    for name, (raw, kind) in raw_tensors.items():
        writer.add_tensor(name, raw, raw_dtype=kind)
    for name, array in gguf_tensors(arch, config, weights).items():
        if name in raw_tensors:
            continue
        block, _ = gguf.GGML_QUANT_SIZES[qtype]
        kind = qtype if array.ndim > 1 and array.shape[-1] % block == 0 else None
        if kind in (None, gguf.GGMLQuantizationType.F32):
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(
    arch: str, config: dict[str, Any], weights: dict[str, torch.Tensor]
) -> dict[str, np.ndarray]:
    """Rename, permute and stack, by the gguf package's own table of names."""
    enum = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
    table = gguf.get_tensor_name_map(enum, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    out: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in weights.items():
        array = tensor.float().numpy()
        parts = name.split(".")
        if arch == "llama" and parts[-2] in heads:
            array = _permute(array, heads[parts[-2]])
        if "experts" in parts:
            stack = f"blk.{parts[2]}.{_EXPERTS[parts[-2]]}.weight"
            stacks.setdefault(stack, {})[int(parts[-3])] = array
            continue
        stem, _, kind = name.rpartition(".")
        out[f"{table.get_name(stem)}.{kind}"] = np.ascontiguousarray(array)
    for name, arrays in stacks.items():
        out[name] = np.stack([arrays[i] for i in range(len(arrays))])
    return out


def checkpoint_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Read a saved model's tensors by the names of its checkpoint."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def save_model_as_gguf(
    path: Path, folder: Path, model: PreTrainedModel, **options: Any
) -> dict[str, torch.Tensor]:
    """Save ``model`` to ``folder`` and from there to a GGUF file; return the checkpoint."""
    model.save_pretrained(folder)
    weights = checkpoint_tensors(folder)
    config = json.loads((folder / "config.json").read_text())
    save_gguf(path, config, weights, **options)
    return weights


def _permute(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Put the rows that rope pairs side by side."""
    shape = (num_heads, 2, array.shape[0] // num_heads // 2, *array.shape[1:])
    return np.ascontiguousarray(array.reshape(shape).swapaxes(1, 2).reshape(array.shape))


def _write_config(
    writer: gguf.GGUFWriter, arch: str, config: dict[str, Any], extra: dict[str, Any]
) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or {}
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    if config["model_type"] in ("mixtral", "qwen3_moe"):
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if config["model_type"] == "qwen3_moe":
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    for key, value in extra.items():
        full = key.replace("ARCH", arch)
        if isinstance(value, str):
            writer.add_string(full, value)
        elif isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        else:
            writer.add_array(full, value)


def _write_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write a byte-level tokenizer."""
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    special = set(tokenizer.all_special_tokens) | set(tokenizer.get_added_vocab())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    writer.add_token_merges(merges)
    for name in ("bos", "eos", "pad"):
        token_id = getattr(tokenizer, f"{name}_token_id")
        if token_id is not None:
            getattr(writer, f"add_{name}_token_id")(token_id)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)
