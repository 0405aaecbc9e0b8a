"""Qwen3, the dense models."""

from __future__ import annotations

from minisgl.models.decoder import DecoderModel


class Qwen3ForCausalLM(DecoderModel):
    """Qwen2 without the biases, with a norm on each head of q and k, and a head size of its own."""
