"""The attention backend ``sdpa``: requests side by side, padded to the longest."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.attention.contract import AttentionBackend, AttentionConfig, LayerAttention
from minisgl.core import Batch
from minisgl_attn_sdpa.groups import Group, Lengths, decode_group, prefill_groups
from minisgl_attn_sdpa.settings import SdpaSettings


@dataclass(slots=True)
class Plan:
    """The groups of one step.

    Attributes:
        groups: Made before the layers run, or by the first of them.
        is_captured: Whether the layers plan, from tensors alone, so that a captured graph holds
            the planning too.
    """

    groups: list[Group] = field(default_factory=list)
    is_captured: bool = False


class SdpaBackend(AttentionBackend):
    """Gathers all keys of a batch into one padded tensor, and attends in one call."""

    def __init__(self, config: AttentionConfig) -> None:
        """Keep the pool, the page table and how each layer attends."""
        settings = config.settings or SdpaSettings()
        assert isinstance(settings, SdpaSettings), "the spec names this class"
        self._max_cells = settings.max_group_cells
        self._page_table = config.context.page_table
        self._page_size = config.context.page_size
        self._pool = config.context.kv_pool
        self._layers = config.layers

    def prepare_metadata(self, batch: Batch) -> None:
        """Lay out one step; padding rows of a decode batch are requests of one token."""
        host = batch.host
        assert host is not None, "the scheduler sets batch.host"
        if batch.is_decode:
            groups = [self._decode_group(batch, -(-int(host.seq_lens.max()) // self._page_size))]
        else:
            lengths = Lengths(host.table_idx, host.cached_lens, host.seq_lens)
            groups = list(
                prefill_groups(self._page_table, lengths, self._page_size, self._max_cells)
            )
        batch.attn_metadata = Plan(groups)

    def forward(self, q: Tensor, layer_id: int, batch: Batch) -> Tensor:
        """Attend with the queries of one layer; see the contract."""
        plan: Plan = batch.attn_metadata
        if plan.is_captured and layer_id == 0:
            plan.groups = [self._decode_group(batch, self._page_table.shape[1])]
        k_pages, v_pages = self._pool.k_cache(layer_id), self._pool.v_cache(layer_id)
        results = [
            attend(q, k_pages[group.pages], v_pages[group.pages], group, self._layers[layer_id])
            for group in plan.groups
        ]
        return results[0] if len(results) == 1 else torch.cat(results)

    def init_graph(self, max_batch_size: int) -> None:
        """Need nothing: a captured step plans by itself from the batch's own tensors."""

    def prepare_for_capture(self, batch: Batch) -> None:
        """Leave the planning to the first layer, inside the graph."""
        batch.attn_metadata = Plan(is_captured=True)

    def prepare_for_replay(self, batch: Batch) -> None:
        """Need nothing: the graph reads page table and lengths where they are."""

    def _decode_group(self, batch: Batch, num_pages: int) -> Group:
        assert batch.table_idx is not None, "the engine sets table_idx before it plans"
        assert batch.seq_lens is not None, "the engine sets seq_lens before it plans"
        return decode_group(self._page_table, batch.table_idx, batch.seq_lens, num_pages)


def attend(q: Tensor, k: Tensor, v: Tensor, group: Group, layer: LayerAttention) -> Tensor:
    """Attend with the queries of one group.

    Args:
        q: ``[num_tokens, num_qo_heads, head_dim]`` of the whole batch.
        k: ``[num_reqs, num_pages, page_size, num_kv_heads, head_dim]`` of the group.
        v: The same shape.
        group: Where its queries are, and what they see.
        layer: Scale and window.

    Returns:
        ``[num_tokens of the group, num_qo_heads, head_dim]``, contiguous.
    """
    k, v = k.flatten(1, 2), v.flatten(1, 2)  # [num_reqs, num_keys, num_kv_heads, head_dim]
    padded = q.unsqueeze(1) if group.rows is None else q[group.rows]
    result = F.scaled_dot_product_attention(
        padded.transpose(1, 2),  # [num_reqs, num_qo_heads, max_queries, head_dim]
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=group.mask(layer.window_left, k.shape[1]),
        scale=layer.sm_scale,
        enable_gqa=True,
    )
    flat = result.transpose(1, 2).flatten(0, 1)  # [num_reqs * max_queries, num_qo_heads, head_dim]
    return flat.contiguous() if group.places is None else flat.index_select(0, group.places)
