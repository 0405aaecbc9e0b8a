"""The attention backend ``fi``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from minisgl.attention.contract import AttentionBackend, AttentionConfig
from minisgl.core import Batch
from minisgl.errors import SettingsError
from minisgl_attn_flashinfer.decode import DecodePlanner
from minisgl_attn_flashinfer.planning import PlanConfig, Workspace
from minisgl_attn_flashinfer.prefill import PrefillPlanner
from minisgl_attn_flashinfer.settings import FlashInferSettings


@dataclass(frozen=True, slots=True)
class FlashInferMetadata:
    """The planned wrappers of one step, one per group of layers that attend alike."""

    wrappers: Sequence[Any]  # FlashInfer's classes are not annotated


class FlashInferBackend(AttentionBackend):
    """Plans each step on the host and runs FlashInfer's paged kernels.

    Layers that share scale and window share a plan. What a phase needs is made when that phase
    first comes, so a backend that serves prefill alone holds nothing for decode.
    """

    def __init__(self, config: AttentionConfig) -> None:
        """Check what the probe could not know; no device memory is taken yet.

        Raises:
            SettingsError: The settings ask for a kernel that does not serve this model here.
        """
        settings = config.settings or FlashInferSettings()
        if not isinstance(settings, FlashInferSettings):
            raise SettingsError(
                f"fi: settings are {type(settings).__name__}; allowed: FlashInferSettings"
            )
        plan_config = PlanConfig.of(config, settings)
        workspace = Workspace(plan_config)
        self._prefill = PrefillPlanner(plan_config, workspace)
        self._decode = DecodePlanner(plan_config, workspace)
        self._group_of_layer = [plan_config.groups.index(layer) for layer in config.layers]
        pool = config.context.kv_pool
        self._caches = [(pool.k_cache(i), pool.v_cache(i)) for i in range(len(config.layers))]

    def prepare_metadata(self, batch: Batch) -> None:
        """Plan the step from the host's arrays; nothing is read back from the device."""
        planner = self._prefill if batch.is_prefill else self._decode
        batch.attn_metadata = FlashInferMetadata(planner.plan(batch))

    def forward(self, q: torch.Tensor, layer_id: int, batch: Batch) -> torch.Tensor:
        """Attend with the wrapper that was planned for this layer's group."""
        # Left to itself, FlashInfer fills what it returns with zeros first.
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self.forward_into(out, q, layer_id, batch)
        return out

    def forward_into(self, out: torch.Tensor, q: torch.Tensor, layer_id: int, batch: Batch) -> None:
        """Attend into ``out``; see `AttentionBackend.forward_into`."""
        metadata: FlashInferMetadata = batch.attn_metadata
        wrapper = metadata.wrappers[self._group_of_layer[layer_id]]
        wrapper.run(q, self._caches[layer_id], out=out)

    def init_graph(self, max_batch_size: int) -> None:
        """Allocate the buffers that all captured sizes share."""
        self._decode.init_graph(max_batch_size)

    def prepare_for_capture(self, batch: Batch) -> None:
        """Make and plan the wrappers of this batch size; the graph keeps their buffers."""
        batch.attn_metadata = FlashInferMetadata(self._decode.plan_for_capture(batch))

    def prepare_for_replay(self, batch: Batch) -> None:
        """Plan the real lengths into the buffers that the graph reads."""
        batch.attn_metadata = FlashInferMetadata(self._decode.plan_for_replay(batch))
