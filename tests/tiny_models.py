"""Tiny random models of every supported architecture, saved as real Hugging Face folders.

``save_tiny_model(folder, TinyModel(arch="qwen3", rope="yarn"))`` writes ``config.json``,
safetensors, a byte-level BPE tokenizer trained on the spot and a chat template, and returns the
Hugging Face model (float32, eval mode) that the weights came from, as the reference to compare
with. The same description always gives the same model. Unlike fresh Hugging Face models, norm
weights and biases are random too, so that one which is not loaded shows in the logits.

``build_tokenizer`` and ``hf_config`` are the parts of it, for tests that need no weights.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral")
MOE_ARCHITECTURES = ("qwen3_moe", "mixtral")
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")

BOS, EOS, PAD, IM_START, IM_END = "<|bos|>", "<|eos|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD, BOS, EOS, IM_START, IM_END)
TOKENIZER_SIZE = 320

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>' + call.function.name + ':' }}"
    "{% for key, value in call.function.arguments.items() %}{{ key ~ '=' ~ value }}{% endfor %}"
    "{{ '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_CORPUS = (
    "The capital of France is Paris. The capital of Italy is Rome.",
    "List three prime numbers: 2, 3, 5, 7, 11, 13.",
    "def fibonacci(n):\n    if n == 0:\n        return 0\n    return fibonacci(n - 1)",
    "héllo wörld 你好，世界 🙂👍🏽 こんにちは",
    "system user assistant You are a helpful assistant.",
)


@dataclass(frozen=True, slots=True)
class TinyModel:
    """Which model to make.

    Attributes:
        arch: One of `ARCHITECTURES`.
        rope: One of `ROPE_KINDS`.
        vocab_size: At least `TOKENIZER_SIZE`; the default is odd, more than the tokenizer uses.
        is_tied: Whether the head is the embedding.
        sliding_window: In tokens, or ``None``.
        num_heads: Query heads.
        num_kv_heads: Divides ``num_heads``; 7:1 and such are welcome.
        head_dim: Apart from ``hidden_size / num_heads`` for the architectures that can.
        max_positions: Context length. ``llama3``, ``yarn`` and ``longrope`` extend a quarter of
            it; ``dynamic`` only differs from ``default`` beyond it.
        seed: Of the weights.
        extra: Further fields of the Hugging Face configuration, such as ``attention_bias=True``.
    """

    arch: str = "llama"
    rope: str = "default"
    vocab_size: int = 331
    is_tied: bool = False
    sliding_window: int | None = None
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    hidden_size: int = 64
    num_layers: int = 2
    num_experts: int = 4
    max_positions: int = 256
    seed: int = 0
    extra: dict[str, Any] = field(default_factory=dict)  # free-form configuration fields


def save_tiny_model(folder: Path, spec: TinyModel, max_shard_size: str = "1GB") -> PreTrainedModel:
    """Write the model and its tokenizer to ``folder``; small ``max_shard_size`` makes shards."""
    model = build_tiny_model(spec)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    build_tokenizer().save_pretrained(folder)
    return model


def build_tiny_model(spec: TinyModel) -> PreTrainedModel:
    """Make the Hugging Face model in float32, eval mode, eager attention; global RNG untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            hf_config(spec), attn_implementation="eager", dtype=torch.float32
        )
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms start at one and biases at zero
                offset = 1.0 if name.endswith("weight") else 0.0
                parameter.data = offset + 0.3 * torch.randn_like(parameter)
    model.generation_config.eos_token_id = [2, 4]
    model.eval()
    return model


def hf_config(spec: TinyModel) -> PreTrainedConfig:
    """Make the Hugging Face configuration."""
    fields: dict[str, Any] = {  # values of many types, as keywords
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": 96,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.2,
        "tie_word_embeddings": spec.is_tied,
        "rope_parameters": rope_parameters(spec.rope, spec.max_positions, spec.head_dim),
        "sliding_window": spec.sliding_window,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if spec.arch == "qwen2":
        del fields["head_dim"]  # always hidden_size / num_heads there
    if spec.arch.startswith("qwen") and spec.sliding_window is not None:
        fields |= {"use_sliding_window": True, "max_window_layers": 1}
    if spec.arch in MOE_ARCHITECTURES:
        fields |= {"num_local_experts": spec.num_experts, "num_experts_per_tok": 2}
    if spec.arch == "qwen3_moe":
        fields |= {"num_experts": spec.num_experts, "moe_intermediate_size": 48}
    return AutoConfig.for_model(spec.arch, **(fields | spec.extra))


def rope_parameters(kind: str, max_positions: int, head_dim: int) -> dict[str, Any]:
    """Make rope parameters of one of `ROPE_KINDS`, sized so that the scaling really matters."""
    base: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0}  # numbers, lists and strings
    original = max_positions // 4
    extra: dict[str, dict[str, Any]] = {  # as above
        "default": {},
        "linear": {"factor": 4.0},
        "dynamic": {"factor": 4.0},
        "llama3": {
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": original,
        },
        "yarn": {"factor": 4.0, "original_max_position_embeddings": original},
        "longrope": {
            "factor": 4.0,
            "original_max_position_embeddings": original,
            "short_factor": [1.0 + 0.05 * i for i in range(head_dim // 2)],
            "long_factor": [1.5 + 0.25 * i for i in range(head_dim // 2)],
        },
    }
    return base | extra[kind]


def build_tokenizer(chat_template: str | None = CHATML_TEMPLATE) -> PreTrainedTokenizerFast:
    """Make a byte-level BPE tokenizer of `TOKENIZER_SIZE` tokens; ids 0 to 4 are special."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_tokenizer_json()),
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


@functools.cache
def _tokenizer_json() -> str:
    """Train the tokenizer once per process."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_SIZE,
        show_progress=False,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    return tokenizer.to_str()
