"""The attention backend ``torch``: the paged reference, planned once per step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from minisgl.attention.contract import AttentionBackend, AttentionConfig
from minisgl.attention.paged_torch import (
    DecodePlan,
    PrefillPlan,
    plan_decode,
    plan_decode_on_device,
    plan_prefill,
    run_decode,
    run_prefill,
)
from minisgl.core import Batch

_Plan = DecodePlan | PrefillPlan


@dataclass(slots=True)
class TorchMetadata:
    """Plans of one step, by ``window_left``; filled by the backend.

    Attributes:
        plans: Made on the host in `prepare_metadata`, or by the first layer of each window.
        is_planned_by_layers: Whether the layers plan, from tensors alone, so that a captured graph
            holds the planning too.
    """

    plans: dict[int, _Plan] = field(default_factory=dict)
    is_planned_by_layers: bool = False


@dataclass(frozen=True, slots=True)
class _Layer:
    """What one layer's `forward` needs; ``is_first`` of the layers with its window."""

    sm_scale: float
    window_left: int
    is_first: bool
    k_cache: torch.Tensor
    v_cache: torch.Tensor


class TorchAttentionBackend(AttentionBackend):
    """Scaled dot-product attention over slots that are gathered or, when adjacent, viewed."""

    def __init__(self, config: AttentionConfig) -> None:
        """Look up each layer's part of the pool."""
        self._dtype = config.dtype
        self._device = config.device
        self._page_size = config.context.page_size
        self._page_table = config.context.page_table
        self._dummy_page = config.context.kv_pool.dummy_page
        self._windows = tuple(dict.fromkeys(layer.window_left for layer in config.layers))
        seen: set[int] = set()
        self._layers: list[_Layer] = []
        for layer_id, layer in enumerate(config.layers):
            self._layers.append(
                _Layer(
                    layer.sm_scale,
                    layer.window_left,
                    layer.window_left not in seen,
                    config.context.kv_pool.k_cache(layer_id),
                    config.context.kv_pool.v_cache(layer_id),
                )
            )
            seen.add(layer.window_left)

    def prepare_metadata(self, batch: Batch) -> None:
        """Plan one step from the host's arrays, once per window."""
        host = batch.host
        assert host is not None, "the scheduler sets batch.host"
        seq_lens, num_pages = host.seq_lens, -(-int(host.seq_lens.max()) // self._page_size)
        page_table = host.page_table[host.table_idx, :num_pages]
        plans: dict[int, _Plan] = {}
        if batch.is_prefill:
            starts = np.concatenate(([0], np.cumsum(seq_lens - host.cached_lens)))
            for window in self._windows:
                plans[window] = plan_prefill(
                    page_table,
                    starts,
                    seq_lens,
                    self._page_size,
                    dtype=self._dtype,
                    device=self._device,
                    window_left=window,
                )
        else:
            page_table, seq_lens = self._pad(page_table, seq_lens, batch.padded_size)
            for window in self._windows:
                plans[window] = plan_decode(
                    page_table,
                    seq_lens,
                    self._page_size,
                    dtype=self._dtype,
                    device=self._device,
                    window_left=window,
                )
        batch.attn_metadata = TorchMetadata(plans)

    def forward(self, q: torch.Tensor, layer_id: int, batch: Batch) -> torch.Tensor:
        """Attend with the queries of one layer; see the contract."""
        layer = self._layers[layer_id]
        metadata: TorchMetadata = batch.attn_metadata
        if metadata.is_planned_by_layers and layer.is_first:
            metadata.plans[layer.window_left] = self._plan_on_device(batch, layer.window_left)
        plan = metadata.plans[layer.window_left]
        if isinstance(plan, PrefillPlan):
            return run_prefill(plan, q, layer.k_cache, layer.v_cache, layer.sm_scale)
        return run_decode(plan, q, layer.k_cache, layer.v_cache, layer.sm_scale)

    def init_graph(self, max_batch_size: int) -> None:
        """Need nothing: a captured step plans by itself from the batch's own tensors."""

    def prepare_for_capture(self, batch: Batch) -> None:
        """Leave the planning to the layers, inside the graph."""
        batch.attn_metadata = TorchMetadata(is_planned_by_layers=True)

    def prepare_for_replay(self, batch: Batch) -> None:
        """Need nothing: the graph reads page table and lengths where they are."""

    def _plan_on_device(self, batch: Batch, window_left: int) -> DecodePlan:
        assert batch.table_idx is not None, "the engine sets table_idx before the model runs"
        assert batch.seq_lens is not None, "the engine sets seq_lens before the model runs"
        return plan_decode_on_device(
            self._page_table.index_select(0, batch.table_idx),
            batch.seq_lens,
            self._page_size,
            dtype=self._dtype,
            window_left=window_left,
        )

    def _pad(
        self, page_table: np.ndarray, seq_lens: np.ndarray, padded_size: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Add rows of length 1 on the dummy page."""
        num_rows = padded_size - len(seq_lens)
        if num_rows <= 0:
            return page_table, seq_lens
        dummy = np.full((num_rows, page_table.shape[1]), self._dummy_page, page_table.dtype)
        ones = np.ones(num_rows, seq_lens.dtype)
        return np.concatenate((page_table, dummy)), np.concatenate((seq_lens, ones))
