"""Requests in a paged pool and the truth about what they attend to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.contract import AttentionConfig, LayerAttention
from minisgl.core import Batch, Context
from minisgl.kvcache.pool import KVPool, PoolShape
from minisgl.testing.paged_batches import PagedBatches, Step, scattered_pages
from minisgl.testing.reference import attend

if TYPE_CHECKING:
    from pydantic import BaseModel

# Slots that belong to nobody hold this: finite, as kernels load whole pages, and far off if used.
GARBAGE = 50.0
_NUM_SPARE_PAGES = 2


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes of a case.

    Attributes:
        num_qo_heads: Query heads.
        num_kv_heads: KV heads.
        head_dim: Of each head.
        page_size: Tokens of a page.
        dtype: Of queries and pool.
        device: Where tensors live.
        windows: ``window_left`` of each layer.
        max_seq_len: Most tokens of a request.
        max_reqs: Rows of the page table.
    """

    num_qo_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    windows: tuple[int, ...] = (-1,)
    max_seq_len: int = 320
    max_reqs: int = 8


class AttentionCase:
    """A context whose pool holds random keys and values of ``max_reqs`` requests.

    Every request has ``max_seq_len`` tokens in scattered pages, so that a batch can use any number
    of them, and whatever lies behind is there to be read by mistake.
    """

    def __init__(self, shape: AttentionShape, seed: int = 0) -> None:
        """Fill a pool."""
        self.shape = shape
        self.device = torch.device(shape.device)
        self._random = torch.Generator().manual_seed(seed)
        max_pages = -(-shape.max_seq_len // shape.page_size)
        heads = (shape.num_kv_heads, shape.head_dim)
        num_pages = shape.max_reqs * max_pages + _NUM_SPARE_PAGES
        self.pool = KVPool(
            PoolShape(len(shape.windows), num_pages, shape.page_size, *heads),
            shape.dtype,
            self.device,
        )
        self.batches = PagedBatches(
            scattered_pages(shape.max_reqs, max_pages, _NUM_SPARE_PAGES, seed),
            self.pool.dummy_page,
            shape.page_size,
            shape.max_seq_len,
            self.device,
        )
        self._keys, self._values = self._fill_pool(heads)
        self.context = Context(shape.page_size)
        self.context.kv_pool = self.pool
        self.context.page_table = self.batches.device_table

    def config(self, settings: BaseModel | None = None) -> AttentionConfig:
        """Return what a backend is built with."""
        shape = self.shape
        return AttentionConfig(
            context=self.context,
            num_qo_heads=shape.num_qo_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
            device=self.device,
            layers=tuple(self.layer(layer_id) for layer_id in range(len(shape.windows))),
            max_running_reqs=shape.max_reqs,
            max_seq_len=shape.max_seq_len,
            settings=settings,
        )

    def layer(self, layer_id: int) -> LayerAttention:
        """Return scale and window of a layer; no two layers have the same scale."""
        scale = self.shape.head_dim**-0.5 * (1 + 0.25 * layer_id)
        return LayerAttention(sm_scale=scale, window_left=self.shape.windows[layer_id])

    def prefill(self, steps: Sequence[Step]) -> Batch:
        """Make a prefill batch of any number of tokens per request."""
        return self.batches.prefill(steps)

    def decode(self, steps: Sequence[Step], padded_size: int = 0) -> Batch:
        """Make a decode batch, padded to a number of rows."""
        return self.batches.decode(steps, padded_size)

    def queries(self, num_tokens: int) -> Tensor:
        """Return random queries as a view into q/k/v products: rows are not adjacent."""
        shape = self.shape
        num_heads = shape.num_qo_heads + 2 * shape.num_kv_heads
        qkv = self._randn(num_tokens, num_heads, shape.head_dim)
        return qkv[:, : shape.num_qo_heads]  # [num_tokens, num_qo_heads, head_dim]

    def expected(self, q: Tensor, batch: Batch, layer_id: int = 0) -> Tensor:
        """Return the true result for the requests of a batch; padding is left out."""
        host = batch.host
        assert host is not None, "made by this class"
        table = (host.table_idx, host.cached_lens, host.seq_lens)
        steps = [Step(*map(int, row)) for row in zip(*table, strict=True)]
        return self.expected_of(q, steps, layer_id)

    def expected_of(self, q: Tensor, steps: Sequence[Step], layer_id: int = 0) -> Tensor:
        """Return the true result of steps, ``[num_tokens, num_qo_heads, head_dim]`` float64."""
        layer = self.layer(layer_id)
        results, start = [], 0
        for row, cached_len, seq_len in steps:
            end = start + seq_len - cached_len
            k = self._keys[layer_id, row, :seq_len]
            v = self._values[layer_id, row, :seq_len]
            results.append(attend(q[start:end], k, v, layer.sm_scale, layer.window_left))
            start = end
        return torch.cat(results)

    def swap_rows(self, first: int, second: int) -> None:
        """Let two requests trade rows of the page table, on the host and on the device."""
        pair, swapped = [first, second], [second, first]
        self.batches.page_table[pair] = self.batches.page_table[swapped]
        self.context.page_table[pair] = self.context.page_table[swapped]
        self._keys[:, pair] = self._keys[:, swapped]
        self._values[:, pair] = self._values[:, swapped]

    def _fill_pool(self, heads: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Write all requests into their pages, and garbage everywhere else."""
        shape = self.shape
        rows = [Step(row, 0, shape.max_seq_len) for row in range(shape.max_reqs)]
        slots = np.stack([self.batches.slots(row) for row in rows])
        where = torch.from_numpy(slots).to(self.device)
        size = (len(shape.windows), shape.max_reqs, shape.max_seq_len, *heads)
        keys, values = self._randn(*size), self._randn(*size)
        for layer_id in range(len(shape.windows)):
            for pool, own in (
                (self.pool.k_slots(layer_id), keys[layer_id]),
                (self.pool.v_slots(layer_id), values[layer_id]),
            ):
                pool.fill_(GARBAGE)
                pool[where] = own
        return keys, values

    def _randn(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self._random).to(self.device, self.shape.dtype)
