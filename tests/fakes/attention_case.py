"""Requests in a paged pool, the batches a scheduler would make of them, and the true result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.contract import AttentionBackend, AttentionConfig, LayerAttention
from minisgl.core import Batch, Context, Req, SamplingParams, StepArrays
from minisgl.kvcache.pool import KVPool, PoolShape
from tests.fakes.fake_paged import Mask, attend

# In slots that no request owns: finite, as kernels read them, and loud if one is attended to.
GARBAGE = 50.0


@dataclass(frozen=True, slots=True)
class CaseShape:
    """Sizes of a case; the layers share them."""

    num_qo_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"
    max_reqs: int = 8
    max_seq_len: int = 320
    windows: tuple[int, ...] = (-1,)

    @property
    def max_pages(self) -> int:
        """Columns of the page table."""
        return -(-self.max_seq_len // self.page_size)

    @property
    def layers(self) -> tuple[LayerAttention, ...]:
        """One layer per window."""
        return tuple(LayerAttention(self.head_dim**-0.5, window) for window in self.windows)


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a batch: tokens before the step, and after it."""

    table_idx: int
    cached_len: int
    seq_len: int


class AttentionCase:
    """A context whose pool holds random keys and values of some requests in scattered pages."""

    def __init__(self, shape: CaseShape, seq_lens: Sequence[int], num_spare_pages: int = 3) -> None:
        """Give request ``i`` row ``i`` of the page table and ``seq_lens[i]`` tokens."""
        self.shape = shape
        self.device = torch.device(shape.device)
        self._gen = torch.Generator().manual_seed(sum(seq_lens) + shape.page_size)
        pages_of = [-(-n // shape.page_size) for n in seq_lens]
        num_pages = sum(pages_of) + num_spare_pages
        self.pool = KVPool(
            PoolShape(
                len(shape.windows), num_pages, shape.page_size, shape.num_kv_heads, shape.head_dim
            ),
            shape.dtype,
            self.device,
        )
        size = (shape.max_reqs + 1, shape.max_pages)
        self.page_table = np.full(size, self.pool.dummy_page, dtype=np.int32)
        order = np.random.default_rng(0).permutation(num_pages).astype(np.int32)
        for row, count in enumerate(pages_of):
            self.page_table[row, :count], order = order[:count], order[count:]
        self._fill_pool(seq_lens)
        self.context = Context(shape.page_size)
        self.context.kv_pool = self.pool
        self.context.page_table = torch.from_numpy(self.page_table.copy()).to(self.device)

    def config(self, settings: Any = None) -> AttentionConfig:  # any plugin's section
        """Return what a backend is built with."""
        shape = self.shape
        return AttentionConfig(
            context=self.context,
            num_qo_heads=shape.num_qo_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
            device=self.device,
            layers=shape.layers,
            max_running_reqs=shape.max_reqs,
            max_seq_len=shape.max_seq_len,
            settings=settings,
        )

    def prefill(self, rows: Sequence[Row]) -> Batch:
        """Return a prefill batch with its device tensors."""
        q_lens = [row.seq_len - row.cached_len for row in rows]
        batch = self._batch("prefill", rows, len(rows))
        batch.cu_seqlens_q = self._ints(np.cumsum([0, *q_lens]))
        batch.max_seqlen_q = max(q_lens)
        return batch

    def decode(self, rows: Sequence[Row], padded_size: int = 0) -> Batch:
        """Return a decode batch; rows beyond the requests are padding."""
        size = max(padded_size, len(rows))
        batch = self._batch("decode", rows, size)
        batch.cu_seqlens_q = self._ints(np.arange(size + 1))
        return batch

    def queries(self, num_tokens: int) -> Tensor:
        """Return random ``[num_tokens, num_qo_heads, head_dim]``, rows strided as in a q/k/v."""
        shape = self.shape
        size = (num_tokens, shape.num_qo_heads + 2 * shape.num_kv_heads, shape.head_dim)
        qkv = torch.randn(size, generator=self._gen).to(self.device, shape.dtype)
        return qkv[:, : shape.num_qo_heads]

    def expected(self, q: Tensor, rows: Sequence[Row], layer_id: int = 0) -> Tensor:
        """Attend naively in float32 on the CPU."""
        layer, start, parts = self.shape.layers[layer_id], 0, []
        mask = Mask(layer.sm_scale, is_causal=True, window_left=layer.window_left)
        for row in rows:
            slots = self._slots(row.table_idx, row.seq_len)
            k = self.pool.k_slots(layer_id)[slots.to(self.device)].cpu()
            v = self.pool.v_slots(layer_id)[slots.to(self.device)].cpu()
            end = start + row.seq_len - row.cached_len
            parts.append(attend(q[start:end].cpu(), k, v, mask)[0])
            start = end
        return torch.cat(parts)

    def _fill_pool(self, seq_lens: Sequence[int]) -> None:
        for layer_id in range(len(self.shape.windows)):
            for flat in (self.pool.k_slots(layer_id), self.pool.v_slots(layer_id)):
                flat.fill_(GARBAGE)
                for row, seq_len in enumerate(seq_lens):
                    values = torch.randn((seq_len, *flat.shape[1:]), generator=self._gen)
                    flat[self._slots(row, seq_len).to(self.device)] = values.to(flat)

    def _slots(self, table_idx: int, seq_len: int) -> Tensor:
        tokens, size = np.arange(seq_len), self.shape.page_size
        pages = self.page_table[table_idx, tokens // size].astype(np.int64)
        return torch.from_numpy(pages * size + tokens % size)

    def _batch(self, phase: Any, rows: Sequence[Row], size: int) -> Batch:  # Any: a Phase
        table_idx = np.array([row.table_idx for row in rows], dtype=np.int32)
        seq_lens = np.array([row.seq_len for row in rows], dtype=np.int32)
        none = np.empty(0, dtype=np.int32)
        host = StepArrays(
            table_idx=table_idx,
            cached_lens=np.array([row.cached_len for row in rows], dtype=np.int32),
            seq_lens=seq_lens,
            page_rows=none,
            page_cols=none,
            page_ids=none,
            page_table=self.page_table,
        )
        num_padding = size - len(rows)
        padding = [self.shape.max_reqs] * num_padding
        reqs = [Req(i, none[:0], 1, SamplingParams()) for i in range(len(rows))]
        batch = Batch(reqs=reqs, phase=phase, host=host, padded_size=size)
        batch.table_idx = self._ints([*table_idx, *padding])
        batch.seq_lens = self._ints([*seq_lens, *[1] * num_padding])
        return batch

    def _ints(self, values: Any) -> Tensor:  # anything that numpy takes
        return torch.from_numpy(np.asarray(values, dtype=np.int32)).to(self.device)


class ReplayedDecode:
    """One layer's decode, captured for a size over fixed tensors and replayed.

    ``capture`` makes the graph: on a CPU it calls the function again, which reads nothing but the
    batch that was captured.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        case: AttentionCase,
        size: int,
        capture: Callable[[Callable[[], list[Tensor]]], Callable[[], list[Tensor]]],
    ) -> None:
        """Capture ``size`` rows of padding."""
        self._backend, self._case, self._size = backend, case, size
        self._fixed = case.decode([], size)
        self._q = case.queries(size).contiguous()
        backend.prepare_for_capture(self._fixed)
        layers = range(len(case.shape.windows))
        fixed, q = self._fixed, self._q
        self._replay = capture(lambda: [backend.forward(q, i, fixed) for i in layers])

    def load(self, batch: Batch, q: Tensor) -> Batch:
        """Copy a batch into the fixed tensors, as an engine does, and let it refer to them."""
        for name in ("table_idx", "seq_lens"):
            getattr(self._fixed, name).copy_(getattr(batch, name))
            setattr(batch, name, getattr(self._fixed, name))
        batch.cu_seqlens_q = self._fixed.cu_seqlens_q
        self._q[: len(q)] = q
        return batch

    def run(self, rows: Sequence[Row], q: Tensor) -> list[Tensor]:
        """Replay with real requests; returns ``[size, heads, head_dim]`` of every layer."""
        return self.run_batch(self._case.decode(rows, self._size), q)

    def run_batch(self, batch: Batch, q: Tensor) -> list[Tensor]:
        """Replay a batch that was made before."""
        self._backend.prepare_for_replay(self.load(batch, q))
        return self.replay()

    def replay(self) -> list[Tensor]:
        """Replay over what is in the fixed tensors."""
        return self._replay()


def assert_near(out: Tensor, expected: Tensor, tolerance: float = 1e-2) -> None:
    """Compare a half-precision result with the reference in float32.

    A hundredth covers the rounding of the output to the 8 bits of bfloat16, of values below
    about 4; kernels that round the weights too need twice that.
    """
    torch.testing.assert_close(out.float().cpu(), expected, atol=tolerance, rtol=tolerance)


def replay_by_calling(step: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
    """Stand in for a graph on a CPU: warm up, then call again at each replay."""
    step()
    return step
