"""Mistral 7B and its relatives."""

from __future__ import annotations

from minisgl.models.decoder import DecoderModel


class MistralForCausalLM(DecoderModel):
    """Llama with a sliding window in all layers where the configuration gives one."""
