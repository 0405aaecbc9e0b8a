"""Qwen3, the mixture-of-experts models."""

from __future__ import annotations

from minisgl.layers.mlp import GatedMLP
from minisgl.layers.moe import ExpertNames, SparseMLP
from minisgl.models.contract import ModelBuild
from minisgl.models.decoder import DecoderModel


class Qwen3MoeForCausalLM(DecoderModel):
    """Qwen3 whose sparse layers have experts; the configuration says which layers stay dense."""

    def build_mlp(self, build: ModelBuild, layer_id: int) -> GatedMLP | SparseMLP:
        """Make experts or a dense MLP."""
        moe = build.config.moe
        if moe is None or not moe.is_sparse[layer_id]:
            return GatedMLP(build)
        return SparseMLP(build, ExpertNames())
