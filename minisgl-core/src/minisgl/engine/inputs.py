"""From the scheduler's arrays to a batch's device tensors: one packed buffer, one copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from minisgl.core import Batch, Context, StepArrays
from minisgl.engine.packed import GrowingStaging, Staging, packed_bytes
from minisgl.engine.prefill_graph import MAX_SAMPLED
from minisgl.engine.row_params import RowParams, sampling_inputs
from minisgl.engine.slots import DecodeSlot, PrefillSlot, StepTensors, prefill_layout

_ROW_BYTES = 128  # all fields of a decode row, or those of a prefill that the model does not read
_UPDATE_BYTES = 1 << 18  # some 20,000 page updates that go along with a captured prefill


class _OpenPrefill(NamedTuple):
    """A prefill that is being written, at the start of the buffers of ``staging``."""

    staging: Staging
    num_bytes: int
    host: dict[str, np.ndarray]
    device: dict[str, torch.Tensor]


class StepInputs:
    """Fills batches; owns the staging buffers and the device page table."""

    def __init__(self, ctx: Context, params: RowParams, max_running_reqs: int) -> None:
        """Allocate staging for decode; that for all else is made and grows on demand."""
        self._ctx = ctx
        self._params = params
        self._device = ctx.page_table.device
        self._dummy_row = max_running_reqs
        self._max_pages = ctx.page_table.shape[1]
        self._pool_width = ctx.token_pool.shape[1]
        self._flat_page_table = ctx.page_table.view(-1)
        # The rows leave room for page updates, which come behind them, and for alignment.
        self._rows_bytes = _ROW_BYTES * (max_running_reqs + 16)
        self._decode = Staging(self._rows_bytes, self._device)
        self._bulk = GrowingStaging(self._device)
        self._slots: dict[int, DecodeSlot] = {}
        self._prefill: Staging | None = None
        self._prefill_slots: dict[int, PrefillSlot] = {}
        self._arange = torch.arange(max_running_reqs + 1, dtype=torch.int32, device=self._device)

    def load_decode(self, batch: Batch, size: int) -> StepTensors:
        """Fill a decode batch, padded to ``size`` rows, and submit the copy.

        Page-table updates are submitted too, so that backends may gather from
        ``ctx.page_table`` at once.
        """
        host = _host(batch)
        slot = self.slot(size)
        views = slot.host[self._decode.acquire()]
        self._fill_decode(views, host, batch.size)
        updates = self._page_updates(host, self._decode.num_bytes - slot.num_bytes)
        self._write_page_table(self._decode.send(updates, slot.num_bytes))
        self.attach(batch, slot)
        return slot.tensors

    def attach(self, batch: Batch, slot: DecodeSlot) -> None:
        """Point a decode batch at the fixed device tensors of a slot."""
        views = slot.device
        batch.padded_size = views["table_idx"].shape[0]
        batch.table_idx = views["table_idx"]
        batch.positions = views["positions"]
        batch.seq_lens = views["seq_lens"]
        batch.out_loc = views["out_loc"]
        batch.cu_seqlens_q = self._arange[: batch.padded_size + 1]
        batch.max_seqlen_q = 1

    def slot(self, size: int) -> DecodeSlot:
        """Return the fixed views for a padded size."""
        found = self._slots.get(size)
        if found is None:
            found = self._slots[size] = DecodeSlot(size, self._decode)
        return found

    def load_dummy(self, size: int) -> DecodeSlot:
        """Make every row of a slot a padding row, for a capture."""
        slot = self.slot(size)
        empty = np.empty(0, np.int32)
        host = StepArrays(empty, empty, empty, empty, empty, empty, np.empty((0, 0), np.int32))
        self._fill_decode(slot.host[self._decode.acquire()], host, 0)
        self._decode.submit(slot.num_bytes)
        return slot

    def _fill_decode(self, views: dict[str, np.ndarray], host: StepArrays, n: int) -> None:
        """Write the host side of a decode step; rows from ``n`` on are padding."""
        page_size = self._ctx.page_size
        rows, positions = host.table_idx, host.cached_lens
        base = rows.astype(np.int64) * self._pool_width
        views["table_idx"][:n] = rows
        views["positions"][:n] = positions
        views["seq_lens"][:n] = host.seq_lens
        np.add(base, positions, out=views["token_loc"][:n])
        np.add(base, host.seq_lens, out=views["write_loc"][:n])
        if n:
            pages = host.page_table[rows, positions // page_size].astype(np.int64)
            views["out_loc"][:n] = pages * page_size + positions % page_size
        if n < len(views["table_idx"]):
            self._pad_decode(views, n)
        self._params.gather(views["table_idx"], views)

    def _pad_decode(self, views: dict[str, np.ndarray], n: int) -> None:
        """Let padding rows be sequences of one token on the dummy page and the dummy row."""
        views["table_idx"][n:] = self._dummy_row
        views["positions"][n:] = 0
        views["seq_lens"][n:] = 1
        views["token_loc"][n:] = self._dummy_row * self._pool_width
        views["write_loc"][n:] = self._dummy_row * self._pool_width
        views["out_loc"][n:] = self._ctx.kv_pool.dummy_page * self._ctx.page_size

    def load_prefill(
        self, batch: Batch, size: int | None = None, scored_rows: np.ndarray | None = None
    ) -> StepTensors:
        """Fill a prefill batch and submit the copy; see `load_decode`.

        Args:
            batch: To fill; its tensors have no padding.
            size: Padded number of tokens of the captured step whose inputs (`prefill_slot`) are
                to be filled, or ``None`` for a step that is launched op by op.
            scored_rows: ``[num_scored]`` int64, further tokens whose logits are wanted; they come
                behind those that sample.
        """
        host = _host(batch)
        sampled = np.flatnonzero(batch.is_sampled)
        lens = host.seq_lens - host.cached_lens
        bounds = np.zeros(batch.size + 1, np.int32)
        np.cumsum(lens, out=bounds[1:])
        wanted = bounds[1:][sampled] - 1
        if scored_rows is not None:
            wanted = np.concatenate((wanted, scored_rows))
        table_rows, seq_lens = host.table_idx[sampled], host.seq_lens[sampled]
        along = {
            "table_idx": host.table_idx,
            "seq_lens": host.seq_lens,
            "cu_seqlens_q": bounds,
            "write_loc": table_rows.astype(np.int64) * self._pool_width + seq_lens,
            "sample_positions": seq_lens,
            **self._params.select(table_rows),
            **self._page_updates(host, None if size is None else _UPDATE_BYTES),
        }
        step = self._open_prefill(size, int(bounds[-1]), len(wanted), packed_bytes(along))
        self._fill_prefill(step.host, batch, bounds, wanted)
        views = step.staging.send(along, step.num_bytes) | step.device
        self._write_page_table(views)
        batch.padded_size = batch.size
        for name in (*step.device, "table_idx", "seq_lens", "cu_seqlens_q"):
            setattr(batch, name, views[name])
        batch.max_seqlen_q = int(lens.max())
        return StepTensors(
            write_loc=views["write_loc"],
            sampling=sampling_inputs(views, views["sample_positions"]),
        )

    def prefill_slot(self, size: int) -> PrefillSlot:
        """Return the fixed inputs of a captured prefill of ``size`` tokens.

        All slots share one buffer, so the first one asked for must be the largest.
        """
        if self._prefill is None:
            num_bytes = prefill_layout(size, MAX_SAMPLED).num_bytes
            self._prefill = Staging(num_bytes + self._rows_bytes + _UPDATE_BYTES, self._device)
        found = self._prefill_slots.get(size)
        if found is None:
            found = self._prefill_slots[size] = PrefillSlot(size, self._prefill)
        return found

    def load_dummy_prefill(self, size: int) -> Batch:
        """Make every token of a slot padding, and return a batch over it, for a capture."""
        slot = self.prefill_slot(size)
        assert self._prefill is not None, "a slot has a buffer"
        self._pad_prefill(slot.host[self._prefill.acquire()], 0, 0)
        self._prefill.submit(slot.num_bytes)
        batch = Batch(reqs=[], phase="prefill")
        for name, tensor in slot.device.items():
            setattr(batch, name, tensor)
        return batch

    def _open_prefill(
        self, size: int | None, num_tokens: int, num_rows: int, num_more_bytes: int
    ) -> _OpenPrefill:
        """Find room for the inputs of a prefill, and for so many bytes behind them."""
        if size is None:
            layout = prefill_layout(num_tokens, num_rows)
            bulk = self._bulk.of(layout.num_bytes + num_more_bytes)
            host = layout.arrays(bulk.memory[bulk.acquire()])
            return _OpenPrefill(bulk, layout.num_bytes, host, layout.views(bulk.device))
        slot, staging = self.prefill_slot(size), self._prefill
        assert staging is not None, "a slot has a buffer"
        host = slot.host[staging.acquire()]
        views = {name: view[:num_tokens] for name, view in slot.device.items()}
        views["sample_rows"] = slot.device["sample_rows"][:num_rows]
        return _OpenPrefill(staging, slot.num_bytes, host, views)

    def _fill_prefill(
        self, views: dict[str, np.ndarray], batch: Batch, bounds: np.ndarray, rows: np.ndarray
    ) -> None:
        """Write what the model reads of a prefill.

        Args:
            views: Of the host buffer; what they have beyond this step is padding.
            batch: The step.
            bounds: ``[num_reqs + 1]`` int32, where the tokens of each request begin.
            rows: Tokens whose logits are wanted.
        """
        host, num_tokens = _host(batch), int(bounds[-1])
        lens = bounds[1:] - bounds[:-1]
        np.concatenate(
            [req.tokens[req.cached_len : req.device_len] for req in batch.reqs],
            out=views["input_ids"][:num_tokens],
        )
        positions = views["positions"][:num_tokens]
        shifts = np.repeat(host.cached_lens - bounds[:-1], lens)
        np.add(np.arange(num_tokens, dtype=np.int32), shifts, out=positions)
        # One flat look-up; one by row and column takes four times as long.
        cols = positions // self._ctx.page_size
        rows_at = host.table_idx.astype(np.int64) * host.page_table.shape[1]
        pages = host.page_table.reshape(-1).take(np.repeat(rows_at, lens) + cols)
        out_loc = views["out_loc"][:num_tokens]
        np.multiply(pages - cols, self._ctx.page_size, out=out_loc, dtype=np.int64)
        out_loc += positions  # page * page_size + positions % page_size
        views["sample_rows"][: len(rows)] = rows
        self._pad_prefill(views, num_tokens, len(rows))

    def _pad_prefill(self, views: dict[str, np.ndarray], num_tokens: int, num_rows: int) -> None:
        """Make all tokens and rows beyond so many padding, which computes on the dummy page."""
        views["input_ids"][num_tokens:] = 0
        views["positions"][num_tokens:] = 0
        views["out_loc"][num_tokens:] = self._ctx.kv_pool.dummy_page * self._ctx.page_size
        views["sample_rows"][num_rows:] = 0

    def _page_updates(self, host: StepArrays, num_free_bytes: int | None) -> dict[str, np.ndarray]:
        """Return where this step's new pages go in the page table, to be sent along with the rest.

        Nothing if there are none, or so many that they had to be sent by themselves: a prefix that
        was found in the cache can be as long as the context.

        Args:
            host: The step.
            num_free_bytes: Room in the buffer of the rest; ``None`` if that can grow.
        """
        if not len(host.page_ids):
            return {}
        loc = host.page_rows.astype(np.int64) * self._max_pages + host.page_cols
        updates = {"page_loc": loc, "page_ids": host.page_ids}
        if num_free_bytes is None or packed_bytes(updates) <= num_free_bytes:
            return updates
        self._write_page_table(self._bulk.send(updates))
        return {}

    def _write_page_table(self, views: Mapping[str, torch.Tensor]) -> None:
        """Scatter the uploaded `_page_updates`, if there were any."""
        if "page_loc" in views:
            self._flat_page_table.index_copy_(0, views["page_loc"], views["page_ids"])


def _host(batch: Batch) -> StepArrays:
    """Return the scheduler's arrays."""
    assert batch.host is not None, "the scheduler sets batch.host"
    return batch.host
