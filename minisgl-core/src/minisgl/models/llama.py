"""Llama 2 and 3.x, and checkpoints that share the class (SmolLM2, TinyLlama, Yi, ...)."""

from __future__ import annotations

from minisgl.models.decoder import DecoderModel


class LlamaForCausalLM(DecoderModel):
    """The shared decoder as it is: optional biases, a tied or an untied head."""
