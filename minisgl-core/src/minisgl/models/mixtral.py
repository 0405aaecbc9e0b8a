"""Mixtral."""

from __future__ import annotations

from minisgl.layers.moe import ExpertNames, SparseMLP
from minisgl.models.contract import ModelBuild
from minisgl.models.decoder import DecoderModel

_NAMES = ExpertNames(gate="w1", up="w3", down="w2", module="block_sparse_moe")


class MixtralForCausalLM(DecoderModel):
    """Mistral with experts in all layers."""

    def build_mlp(self, build: ModelBuild, layer_id: int) -> SparseMLP:
        """Make experts."""
        return SparseMLP(build, _NAMES)
