"""Qwen2 and Qwen2.5."""

from __future__ import annotations

from minisgl.models.decoder import DecoderModel


class Qwen2ForCausalLM(DecoderModel):
    """Llama with biases on q, k and v, and sliding windows in the upper layers when flagged."""
