"""The MoE backend ``fused``."""

from __future__ import annotations

import torch

from minisgl.device import compute_capability
from minisgl.moe.contract import MoEBackend, MoEConfig
from minisgl_moe_triton.launch import Launcher, LayerInputs
from minisgl_moe_triton.plan import LayerShape, Step
from minisgl_moe_triton.settings import FusedSettings
from minisgl_moe_triton.tables import find_steps
from minisgl_moe_triton.triton_jit import turn_to_launch
from minisgl_moe_triton.workspace import Workspace


class FusedMoEBackend(MoEBackend):
    """Routes, sorts and multiplies on the device; the host waits for nothing.

    All layers share one workspace, so that one backend serves one stream at a time. Sums are in a
    fixed order: the same inputs give the same bits, whoever else is in the batch of as many tokens.
    """

    def __init__(self, config: MoEConfig) -> None:
        """Choose tiles and allocate the workspace.

        Raises:
            SettingsError: A table of tiles cannot be read.
        """
        settings = config.settings
        if not isinstance(settings, FusedSettings):
            settings = FusedSettings()
        sm = compute_capability(config.device)
        shape = shape_of(config)
        device = torch.cuda.get_device_name(config.device) if sm is not None else "interpreter"
        self._steps = find_steps(shape, device, sm, settings.table)
        self._chunk_tokens = min(settings.chunk_tokens, max(1, config.max_num_tokens))
        workspace = Workspace(shape, self._steps, self._chunk_tokens, config.device)
        has_overlap = settings.launch_overlap == "auto" and sm is not None and sm >= 90
        self._turn = turn_to_launch()
        self._launcher = Launcher(shape, config.is_renormalized, workspace, has_overlap)

    def forward(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        gate_up_weight: torch.Tensor,
        down_weight: torch.Tensor,
    ) -> torch.Tensor:
        """Compute one MoE layer; see the contract.

        Any number of tokens is served: more than the workspace holds run in parts.
        """
        x, logits = hidden_states.contiguous(), router_logits.contiguous()
        weights = gate_up_weight.contiguous(), down_weight.contiguous()
        out = torch.empty_like(x)
        with self._turn:
            for start in range(0, len(x), self._chunk_tokens):
                part = slice(start, start + self._chunk_tokens)
                inputs = LayerInputs(x[part], logits[part], *weights)
                self._launcher.run(inputs, self._step_for(len(inputs.hidden_states)), out[part])
        return out

    def _step_for(self, num_tokens: int) -> Step:
        for step in self._steps:
            if num_tokens <= step.max_tokens:
                return step
        return self._steps[-1]


def shape_of(config: MoEConfig) -> LayerShape:
    """Return what of a configuration the choice of tiles depends on."""
    return LayerShape(
        num_experts=config.num_experts,
        top_k=config.top_k,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        dtype=str(config.dtype).removeprefix("torch."),
    )
