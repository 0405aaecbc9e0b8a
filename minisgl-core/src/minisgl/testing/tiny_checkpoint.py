"""A tiny model folder without a download: for a plugin's own tests.

``write_tiny_checkpoint(folder)`` makes what ``minisgl generate --model FOLDER --dummy-weight`` and
``LLM(str(folder), dummy_weight=True)`` can open: config.json and a tokenizer. Weights are not in
it, because ``--dummy-weight`` makes the same ones every time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END = "<|end|>"
VOCAB_SIZE = 272
"""Rows of the embedding: 256 bytes, the end token, and some that the tokenizer does not use."""

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "eos_token_id": 256,
}
_EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}


def write_tiny_checkpoint(
    folder: Path, *, has_experts: bool = False, **fields: Any
) -> Path:  # Any: JSON
    """Write config.json and a tokenizer of single bytes; token 256 ends the text.

    Args:
        folder: Where to write; made if need be.
        has_experts: Whether the MLPs are mixtures of four experts (Qwen3-MoE) or dense (Llama).
        fields: Fields of config.json that differ, such as ``num_hidden_layers=3``.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = _LLAMA | (_EXPERTS if has_experts else {}) | fields
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    _tokenizer().save(str(folder / "tokenizer.json"))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config), encoding="utf-8")
    return folder


def _tokenizer() -> Tokenizer:
    """Make a tokenizer that knows single bytes and no merges."""
    # The printable characters that stand for bytes.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: token for token, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return tokenizer
