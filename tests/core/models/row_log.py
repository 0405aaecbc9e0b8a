"""Watching how many rows a model computes behind its last attention call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from minisgl.attention.contract import AttentionBackend
from minisgl.core import Batch
from minisgl.models.contract import Model, ModelBuild
from minisgl.moe.contract import MoEBackend
from minisgl.ops.contract import GatedActivation, KernelTable, PackedLinear
from minisgl.testing.model_case import ModelCase, random_checkpoint, read_config, tiny_config
from minisgl.testing.selection import TestedBackend


class RowLog:
    """The rows of every product, norm and expert layer since the last attention call.

    Attributes:
        rows: Of each, in order.
        case: The model that is watched, built by the conformance suite's means.
    """

    def __init__(self, backend: TestedBackend, kernels: KernelTable) -> None:
        """Build the small model of an architecture over ``kernels``, and watch it."""
        self.rows: list[int] = []

        def factory(build: ModelBuild) -> Model:
            model: Model = backend.factory(replace(build, kernels=self._watched(kernels)))
            return model

        config = read_config(backend, tiny_config(backend))
        watched = replace(backend, factory=factory)
        self.case = ModelCase(watched, config, random_checkpoint(backend, config))
        context = self.case.context
        context.attn_backend = _WatchedAttention(context.attn_backend, self.rows)
        if config.moe is not None:
            context.moe_backend = _WatchedExperts(context.moe_backend, self.rows)

    def _watched(self, kernels: KernelTable) -> KernelTable:
        return replace(
            kernels,
            rms_norm=self._counted(kernels.rms_norm),
            fused_add_rms_norm=self._counted(kernels.fused_add_rms_norm),
            pack_linear=self._packer(kernels.pack_linear),
            pack_gated_linear=self._packer(kernels.pack_gated_linear),
        )

    def _counted(self, op: Callable[..., Any]) -> Callable[..., Any]:  # Any: whatever the op has
        def counted(x: Tensor, *args: Any) -> Any:
            self.rows.append(len(x))
            return op(x, *args)

        return counted

    def _packer(self, pack: Callable[..., PackedLinear]) -> Callable[..., PackedLinear]:
        def packer(
            weight: Tensor, bias: Tensor | None, *activation: GatedActivation, **more: Any
        ) -> PackedLinear:  # Any: the activation, by its name
            return _WatchedLinear(pack(weight, bias, *activation, **more), self.rows)

        return packer


class _WatchedLinear:
    def __init__(self, packed: PackedLinear, rows: list[int]) -> None:
        self._packed, self._rows = packed, rows
        self.is_original_needed = packed.is_original_needed

    def __call__(self, x: Tensor) -> Tensor:
        self._rows.append(len(x))
        return self._packed(x)


class _WatchedAttention(AttentionBackend):
    """Begins the log anew with every call."""

    def __init__(self, backend: AttentionBackend, rows: list[int]) -> None:
        self._backend, self._rows = backend, rows

    def prepare_metadata(self, batch: Batch) -> None:
        self._backend.prepare_metadata(batch)

    def forward(self, q: Tensor, layer_id: int, batch: Batch) -> Tensor:
        self._rows.clear()
        return self._backend.forward(q, layer_id, batch)


class _WatchedExperts(MoEBackend):
    def __init__(self, backend: MoEBackend, rows: list[int]) -> None:
        self._backend, self._rows = backend, rows

    def forward(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        gate_up_weight: Tensor,
        down_weight: Tensor,
    ) -> Tensor:
        self._rows.append(len(hidden_states))
        return self._backend.forward(hidden_states, router_logits, gate_up_weight, down_weight)
