"""Requests that attend together: their padded layout, and the mask that makes up for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor


@dataclass(slots=True)
class Group:
    """Some requests of a batch, side by side; `mask` is filled by the layers.

    Attributes:
        pages: ``[num_reqs, num_pages]`` pages of each request, whatever is behind its end.
        query_at: ``[num_reqs, max_queries]`` position of each query.
        rows: ``[num_reqs, max_queries]`` int64 token of the batch that each query is; requests
            with fewer queries repeat their last one. ``None`` in decode, one token per request.
        places: ``[num_tokens]`` int64 where in the flat ``rows`` each token is; ``None`` in decode.
        masks: By window, ``[num_reqs, 1, max_queries, num_keys]``.
    """

    pages: Tensor
    query_at: Tensor
    rows: Tensor | None
    places: Tensor | None
    masks: dict[int, Tensor] = field(default_factory=dict)

    def mask(self, window_left: int, num_keys: int) -> Tensor:
        """Return which keys each query sees, made by the first layer of each window."""
        if window_left not in self.masks:
            key_at = torch.arange(num_keys, device=self.query_at.device)
            query_at = self.query_at.unsqueeze(-1)
            is_seen = key_at <= query_at
            if window_left >= 0:
                is_seen &= key_at >= query_at - window_left
            self.masks[window_left] = is_seen.unsqueeze(1)
        return self.masks[window_left]


@dataclass(frozen=True, slots=True)
class Lengths:
    """What a prefill consists of, on the host; all ``[num_reqs]`` int32.

    Attributes:
        table_idx: Row of the page table.
        cached: Tokens before the first query.
        total: Tokens in all.
    """

    table_idx: np.ndarray
    cached: np.ndarray
    total: np.ndarray


def decode_group(page_table: Tensor, table_idx: Tensor, seq_lens: Tensor, num_pages: int) -> Group:
    """Make the one group of a decode batch, from tensors alone: nothing depends on the host.

    Args:
        page_table: ``[num_rows, max_pages]`` int32.
        table_idx: ``[num_reqs]`` int32.
        seq_lens: ``[num_reqs]`` int32.
        num_pages: Columns that the longest request needs.
    """
    pages = page_table[:, :num_pages].index_select(0, table_idx)
    return Group(pages, (seq_lens - 1).unsqueeze(1), rows=None, places=None)


def prefill_groups(
    page_table: Tensor, lengths: Lengths, page_size: int, max_cells: int
) -> Iterator[Group]:
    """Cut a prefill into groups of requests in order, and lay each out.

    Args:
        page_table: ``[num_rows, max_pages]`` int32 on the device.
        lengths: The requests.
        page_size: Tokens of a page.
        max_cells: Cells of a group's mask; a single request may have more.
    """
    num_queries = lengths.total - lengths.cached
    starts = np.concatenate(([0], np.cumsum(num_queries)))
    for first, end in _cuts(num_queries, lengths.total, max_cells):
        part, device = slice(first, end), page_table.device
        widest = np.arange(int(num_queries[part].max()))
        # The last query again in place of padding: it sees something, so no row is all masked.
        step = np.minimum(widest, num_queries[part, None] - 1)
        num_pages = -(-int(lengths.total[part].max()) // page_size)
        table_idx = torch.from_numpy(lengths.table_idx[part].astype(np.int64)).to(device)
        yield Group(
            pages=page_table[:, :num_pages].index_select(0, table_idx),
            query_at=torch.from_numpy(lengths.cached[part, None] + step).to(device),
            rows=torch.from_numpy(starts[part, None] + step).to(device),
            places=torch.from_numpy(np.flatnonzero(widest < num_queries[part, None])).to(device),
        )


def _cuts(num_queries: np.ndarray, totals: np.ndarray, max_cells: int) -> Iterator[tuple[int, int]]:
    """Yield first and end of each group, as many requests as fit."""
    first = 0
    while first < len(totals):
        end, width, height = first, 0, 0
        while end < len(totals):
            width, height = max(width, totals[end]), max(height, num_queries[end])
            if end > first and (end + 1 - first) * int(width) * int(height) > max_cells:
                break
            end += 1
        yield first, end
        first = end
