"""The demo model in Hugging Face's hands, read by the ``gguf`` package alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load_reference(path: Path) -> LlamaForCausalLM:
    """Read a Llama GGUF file into Hugging Face's class, float32."""
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    num_heads = fields["llama.attention.head_count"]
    num_kv_heads = fields["llama.attention.head_count_kv"]
    state = {}
    for tensor in reader.tensors:
        array = gguf.dequantize(tensor.data, tensor.tensor_type)
        if ".attn_q." in tensor.name:
            array = _in_halves(array, num_heads)
        elif ".attn_k." in tensor.name:
            array = _in_halves(array, num_kv_heads)
        state[_hf_name(tensor.name)] = torch.from_numpy(array.astype(np.float32))
    is_tied = "lm_head.weight" not in state
    config = LlamaConfig(**_config(fields), vocab_size=len(state["model.embed_tokens.weight"]))
    config.tie_word_embeddings = is_tied
    model = LlamaForCausalLM(config)
    model.eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if is_tied else [])
    model.tie_weights()
    return model


def _config(fields: dict[str, Any]) -> dict[str, Any]:  # Any: metadata of every type
    return {
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "max_position_embeddings": fields["llama.context_length"],
        "rope_parameters": {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
    }


def _hf_name(name: str) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", name)
    assert match is not None, name
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{layer}{_NAMES[match[2]]}.weight"


def _in_halves(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo GGUF's order of rows, which rotates pairs of neighbours; Hugging Face rotates halves."""
    pairs = array.reshape(num_heads, -1, 2, array.shape[1])
    return pairs.swapaxes(1, 2).reshape(array.shape)
