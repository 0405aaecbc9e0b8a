"""Architectures with one fault each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from minisgl.core import get_global_ctx
from minisgl.layers.base import LoadTarget
from minisgl.models.contract import ModelBuild
from minisgl.models.llama import LlamaForCausalLM


class BrokenLlama(LlamaForCausalLM):
    """Llama under a name of its own, which transformers does not know."""

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        fields = LlamaForCausalLM.tiny_config() | {"model_type": "", "num_hidden_layers": 2}
        # Without biases: they are no part of these faults.
        return fields | {"attention_bias": False, "mlp_bias": False}


class PosesAsLlama(LlamaForCausalLM):
    """Compared with transformers."""

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        fields = LlamaForCausalLM.tiny_config() | {"num_hidden_layers": 2}
        return fields | {"architectures": ["LlamaForCausalLM"]}


class UsesAnotherScale(PosesAsLlama):
    """Attends with one over the head dimension."""

    def __init__(self, build: ModelBuild) -> None:
        super().__init__(build)
        self.layers_attention = tuple(
            replace(layer, sm_scale=1 / self.head_dim) for layer in self.layers_attention
        )


class ComputesNormsWithAnotherEps(PosesAsLlama):
    """Takes the default instead of the configuration's."""

    def __init__(self, build: ModelBuild) -> None:
        super().__init__(replace(build, config=replace(build.config, rms_norm_eps=0.1)))


class HasNoTinyConfig(LlamaForCausalLM):
    """Nothing to build."""

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        raise NotImplementedError


class IgnoresPositions(BrokenLlama):
    """Every token is turned as if it were the first."""

    def forward(self) -> torch.Tensor:
        batch = get_global_ctx().batch
        positions = batch.positions
        assert positions is not None
        batch.positions = torch.zeros_like(positions)
        try:
            return super().forward()
        finally:
            batch.positions = positions


class LeavesOutANorm(BrokenLlama):
    """A parameter that nobody loads."""

    def load_targets(self, prefix: str = "") -> Iterator[tuple[str, LoadTarget]]:
        for name, target in super().load_targets(prefix):
            if name != "model.norm.weight":
                yield name, target


class LoadsTheGateTwice(BrokenLlama):
    """The gate goes where the up projection belongs as well."""

    def load_targets(self, prefix: str = "") -> Iterator[tuple[str, LoadTarget]]:
        targets = dict(super().load_targets(prefix))
        for name, target in targets.items():
            if name.endswith("up_proj.weight"):
                gate = targets[name.replace("up_proj", "gate_proj")]
                yield name, replace(target, dest=gate.dest)
            else:
                yield name, target


class ReturnsEveryRow(BrokenLlama):
    """Logits of every token of a prompt."""

    def forward(self) -> torch.Tensor:
        batch = get_global_ctx().batch
        rows = batch.sample_rows
        if rows is not None and batch.positions is not None:
            batch.sample_rows = torch.arange(len(batch.positions))
        try:
            return super().forward()
        finally:
            batch.sample_rows = rows


class ReturnsFloat32(BrokenLlama):
    """Logits of a type that nobody asked for."""

    def forward(self) -> torch.Tensor:
        return super().forward().float()


class MixesTheBatch(BrokenLlama):
    """Centres logits over the requests."""

    def forward(self) -> torch.Tensor:
        logits = super().forward()
        return logits - logits.mean(dim=0, keepdim=True)


class WritesIntoTheBatch(BrokenLlama):
    """Clamps token ids in place."""

    def forward(self) -> torch.Tensor:
        logits = super().forward()
        ids = get_global_ctx().batch.input_ids
        assert ids is not None
        ids.clamp_(max=50)
        return logits


class KeepsTheFirstBatch(BrokenLlama):
    """Remembers the positions of the first decode step of a size."""

    def __init__(self, build: ModelBuild) -> None:
        super().__init__(build)
        self._seen: dict[int, torch.Tensor] = {}

    def forward(self) -> torch.Tensor:
        batch = get_global_ctx().batch
        assert batch.positions is not None
        if batch.is_decode:
            key = batch.padded_size
            batch.positions = self._seen.setdefault(key, batch.positions.clone())
        return super().forward()


class ForgetsToSumOverRanks(BrokenLlama):
    """Each rank keeps its part of the attention output."""

    def __init__(self, build: ModelBuild) -> None:
        super().__init__(build)
        for layer in self.model.layers:
            norm = layer.post_attention_layernorm
            norm.forward_sum_add = norm.forward_add  # type: ignore[method-assign]  # one fault, in one place


class NeverTiesTheHead(BrokenLlama):
    """Wants a head of its own whatever the configuration says."""

    def __init__(self, build: ModelBuild) -> None:
        super().__init__(replace(build, config=replace(build.config, has_tied_head=False)))


class KnowsFewPositions(BrokenLlama):
    """Its table of rotations ends early."""

    def __init__(self, build: ModelBuild) -> None:
        super().__init__(replace(build, max_seq_len=80))


class StoresKeysOneSlotTooFar(BrokenLlama):
    """Off by one."""

    def forward(self) -> torch.Tensor:
        ctx = get_global_ctx()
        batch, loc = ctx.batch, ctx.batch.out_loc
        assert loc is not None
        batch.out_loc = loc + 1
        try:
            return super().forward()
        finally:
            batch.out_loc = loc


class CountsOneLayerTooMany(BrokenLlama):
    """Asks for more keys and values than it has layers."""

    def __init__(self, build: ModelBuild) -> None:
        super().__init__(build)
        self.layers_attention = (*self.layers_attention, self.layers_attention[0])
