"""Requests in a paged pool, the batches that a scheduler would make of them, and the truth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.contract import AttentionConfig, LayerAttention
from minisgl.core import Batch, Context, Req, SamplingParams, StepArrays
from minisgl.kvcache.pool import KVPool, PoolShape
from minisgl.testing.reference import attend

# Slots that belong to nobody hold this: finite, as kernels load whole pages, and far off if used.
GARBAGE = 50.0


class Step(NamedTuple):
    """What one request does in a step: row of the page table, tokens before it and after it."""

    row: int
    cached_len: int
    seq_len: int


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
        num_pages = shape.max_reqs * max_pages
        heads = (shape.num_kv_heads, shape.head_dim)
        self.pool = KVPool(
            PoolShape(len(shape.windows), num_pages + 2, shape.page_size, *heads),
            shape.dtype,
            self.device,
        )
        pages = np.random.default_rng(seed).permutation(num_pages + 2)[:num_pages]
        self.page_table = pages.astype(np.int32).reshape(shape.max_reqs, max_pages)
        self._keys, self._values = self._fill_pool(heads)
        self.context = Context(shape.page_size)
        self.context.kv_pool = self.pool
        dummy_row = np.full((1, max_pages), self.pool.dummy_page, dtype=np.int32)
        table = np.concatenate((self.page_table, dummy_row))
        self.context.page_table = torch.from_numpy(table).to(self.device)

    def config(self) -> AttentionConfig:
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
        )

    def layer(self, layer_id: int) -> LayerAttention:
        """Return scale and window of a layer; no two layers have the same scale."""
        scale = self.shape.head_dim**-0.5 * (1 + 0.25 * layer_id)
        return LayerAttention(sm_scale=scale, window_left=self.shape.windows[layer_id])

    def prefill(self, steps: Sequence[Step]) -> Batch:
        """Make a prefill batch of any number of tokens per request."""
        lens = [step.seq_len - step.cached_len for step in steps]
        batch = self._batch(steps)
        batch.is_sampled = [True] * len(steps)
        batch.padded_size = len(steps)
        self._set_tensors(batch, steps)
        batch.cu_seqlens_q = self._int32([0, *np.cumsum(lens).tolist()])
        batch.max_seqlen_q = max(lens)
        last = np.cumsum(lens) - 1
        batch.sample_rows = torch.from_numpy(last).to(self.device, torch.int64)
        return batch

    def decode(self, seq_lens: Sequence[int], padded_size: int = 0) -> Batch:
        """Make a decode batch of rows 0, 1, …, padded to a number of rows."""
        steps = [Step(row, seq_len - 1, seq_len) for row, seq_len in enumerate(seq_lens)]
        size = max(padded_size, len(steps))
        batch = self._batch(steps, phase="decode")
        batch.padded_size = size
        padding = [Step(self.shape.max_reqs, 0, 1)] * (size - len(steps))
        self._set_tensors(batch, [*steps, *padding])
        batch.cu_seqlens_q = self._int32(range(size + 1))
        return batch

    def queries(self, num_tokens: int) -> Tensor:
        """Return random queries as a view into q/k/v products: rows are not adjacent."""
        shape = self.shape
        num_heads = shape.num_qo_heads + 2 * shape.num_kv_heads
        qkv = self._randn(num_tokens, num_heads, shape.head_dim)
        return qkv[:, : shape.num_qo_heads]  # [num_tokens, num_qo_heads, head_dim]

    def expected(self, q: Tensor, batch: Batch, layer_id: int = 0) -> Tensor:
        """Return the true result for the requests of a batch; padding is left out."""
        assert batch.host is not None, "made by this class"
        layer = self.layer(layer_id)
        results, start = [], 0
        for row, cached_len, seq_len in zip(
            batch.host.table_idx, batch.host.cached_lens, batch.host.seq_lens, strict=True
        ):
            end = start + int(seq_len - cached_len)
            k = self._keys[layer_id, row, :seq_len]
            v = self._values[layer_id, row, :seq_len]
            results.append(attend(q[start:end], k, v, layer.sm_scale, layer.window_left))
            start = end
        return torch.cat(results)  # [num_tokens, num_qo_heads, head_dim]

    def swap_rows(self, first: int, second: int) -> None:
        """Let two requests trade rows of the page table, on the host and on the device."""
        pair, swapped = [first, second], [second, first]
        self.page_table[pair] = self.page_table[swapped]
        self.context.page_table[pair] = self.context.page_table[swapped]
        self._keys[:, pair] = self._keys[:, swapped]
        self._values[:, pair] = self._values[:, swapped]

    def _fill_pool(self, heads: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Write all requests into their pages, and garbage everywhere else."""
        shape = self.shape
        num_slots = self.page_table.shape[1] * shape.page_size
        slots = self.page_table[:, :, None].astype(np.int64) * shape.page_size
        slots = (slots + np.arange(shape.page_size)).reshape(shape.max_reqs, num_slots)
        where = torch.from_numpy(slots[:, : shape.max_seq_len].copy()).to(self.device)
        size = (len(shape.windows), shape.max_reqs, shape.max_seq_len, *heads)
        keys, values = self._randn(*size), self._randn(*size)
        for layer_id in range(len(shape.windows)):
            for pool, rows in (
                (self.pool.k_slots(layer_id), keys[layer_id]),
                (self.pool.v_slots(layer_id), values[layer_id]),
            ):
                pool.fill_(GARBAGE)
                pool[where] = rows
        return keys, values

    def _batch(self, steps: Sequence[Step], phase: str = "prefill") -> Batch:
        params = SamplingParams()
        reqs = []
        for uid, step in enumerate(steps):
            req = Req(uid, np.zeros(step.seq_len, np.int32), self.shape.max_seq_len + 1, params)
            req.table_idx, req.cached_len = step.row, step.cached_len
            reqs.append(req)
        table = np.array(steps, dtype=np.int32).reshape(-1, 3)
        rows, cached, total = (column.copy() for column in table.T)
        none = np.empty(0, np.int32)
        host = StepArrays(rows, cached, total, none, none, none, self.page_table)
        return Batch(reqs, "decode" if phase == "decode" else "prefill", host=host)

    def _set_tensors(self, batch: Batch, steps: Sequence[Step]) -> None:
        """Set the device tensors as the engine does."""
        page_size, table = self.shape.page_size, self.context.page_table.cpu().numpy()
        positions = [np.arange(step.cached_len, step.seq_len) for step in steps]
        slots = [
            table[step.row, at // page_size].astype(np.int64) * page_size + at % page_size
            for step, at in zip(steps, positions, strict=True)
        ]
        batch.positions = self._int32(np.concatenate(positions))
        batch.input_ids = torch.zeros_like(batch.positions)
        batch.out_loc = torch.from_numpy(np.concatenate(slots)).to(self.device)
        batch.table_idx = self._int32([step.row for step in steps])
        batch.seq_lens = self._int32([step.seq_len for step in steps])

    def _int32(self, values: Sequence[int] | np.ndarray | range) -> Tensor:
        return torch.tensor(np.array(values, dtype=np.int32), device=self.device)

    def _randn(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self._random).to(self.device, self.shape.dtype)


class CapturedStep:
    """Some code captured once and replayed: a CUDA graph, or on a CPU a call that stands for one.

    Attributes:
        output: The fixed tensor that a replay fills.
    """

    def __init__(self, step: Callable[[], Tensor], device: torch.device) -> None:
        """Capture ``step``; it may read fixed tensors alone."""
        self._step = step
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            step()  # lazy initialisation must not be captured
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self.output = step()
        else:
            self.output = step().clone()

    def replay(self) -> Tensor:
        """Run it again."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self.output.copy_(self._step())
        return self.output
