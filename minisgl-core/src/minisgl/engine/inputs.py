"""From the scheduler's arrays to a batch's device tensors: one packed buffer, one copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from minisgl.core import Batch, Context, StepArrays
from minisgl.engine.packed import Field, PackedLayout, Staging, numpy_views
from minisgl.engine.prefill_graph import MAX_SAMPLED
from minisgl.engine.row_params import RowParams, param_fields, sampling_inputs
from minisgl.ops.contract import SamplingInputs

_I32, _I64 = torch.int32, torch.int64
_TORCH: Mapping[np.dtype[Any], torch.dtype] = {  # Any: each has another scalar
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}
_NUMPY = {v: k for k, v in _TORCH.items()}


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Device tensors of a step that the model does not need; views of the packed buffer.

    Attributes:
        token_loc: Flat token-pool index of each input token, int64: read in decode, written in
            prefill; ``[num_tokens]``.
        write_loc: Flat token-pool index of each sampled token, int64; ``[num_sampled]``.
        sampling: Parameters of the rows that sample.
    """

    token_loc: torch.Tensor
    write_loc: torch.Tensor
    sampling: SamplingInputs


class DecodeSlot:
    """The views for one padded size: fixed addresses that a captured graph reads."""

    def __init__(self, size: int, staging: Staging) -> None:
        """Lay out a decode step of ``size`` rows at the start of the buffers."""
        fields = [
            Field("table_idx", _I32, size),
            Field("positions", _I32, size),
            Field("seq_lens", _I32, size),
            Field("out_loc", _I64, size),
            Field("token_loc", _I64, size),
            Field("write_loc", _I64, size),
            *param_fields(size),
        ]
        layout = PackedLayout(fields)
        self.num_bytes = layout.num_bytes
        self.host = [numpy_views(layout.views(buffer)) for buffer in staging.host]
        self.device = layout.views(staging.device)
        self.tensors = StepTensors(
            token_loc=self.device["token_loc"],
            write_loc=self.device["write_loc"],
            sampling=sampling_inputs(self.device, self.device["seq_lens"]),
        )


class PrefillSlot:
    """What a captured prefill of one padded size reads, at fixed addresses."""

    def __init__(self, size: int, staging: Staging) -> None:
        """Lay out a step of ``size`` tokens at the start of the buffers."""
        layout = self.layout(size)
        self.num_bytes = layout.num_bytes
        self.host = [numpy_views(layout.views(buffer)) for buffer in staging.host]
        self.device = layout.views(staging.device)

    @staticmethod
    def layout(size: int) -> PackedLayout:
        """Place the inputs of the model."""
        return PackedLayout(
            [
                Field("input_ids", _I32, size),
                Field("positions", _I32, size),
                Field("out_loc", _I64, size),
                Field("sample_rows", _I64, MAX_SAMPLED),
            ]
        )


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
        # A decode row has under 128 bytes of fields; page updates come behind them.
        self._decode = Staging(128 * (max_running_reqs + 16), self._device)
        self._bulk = Staging(1 << 16, self._device)
        self._slots: dict[int, DecodeSlot] = {}
        self._prefill: Staging | None = None
        self._prefill_slots: dict[int, PrefillSlot] = {}
        self._arange = torch.arange(max_running_reqs + 1, dtype=_I32, device=self._device)

    def load_decode(self, batch: Batch, size: int) -> StepTensors:
        """Fill a decode batch, padded to ``size`` rows, and submit the copy.

        Page-table updates are submitted too, so that backends may gather from
        ``ctx.page_table`` at once.
        """
        host = _host(batch)
        slot = self.slot(size)
        views = slot.host[self._decode.acquire()]
        self._fill_decode(views, host, batch.size)
        self._decode.submit(slot.num_bytes)
        self._update_page_table(host)
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
        """Fill a prefill batch and submit the copies; see `load_decode`.

        Args:
            batch: To fill; its tensors have no padding.
            size: Padded number of tokens of the captured step whose inputs (`prefill_slot`) are
                to be filled, or ``None`` for a step that is launched op by op.
            scored_rows: ``[num_scored]`` int64, further tokens whose logits are wanted; they come
                behind those that sample.
        """
        host = _host(batch)
        lens = host.seq_lens - host.cached_lens
        rows = np.repeat(np.arange(batch.size), lens)
        starts = np.cumsum(lens) - lens
        positions = np.arange(len(rows)) - starts[rows] + host.cached_lens[rows]
        table_rows = host.table_idx[rows].astype(np.int64)
        page_size = self._ctx.page_size
        pages = host.page_table[table_rows, positions // page_size].astype(np.int64)
        sampled = np.flatnonzero(batch.is_sampled)
        sampled_rows = host.table_idx[sampled]
        tokens = [r.tokens[r.cached_len : r.device_len] for r in batch.reqs]
        params = {f.name: np.empty(f.length, _NUMPY[f.dtype]) for f in param_fields(len(sampled))}
        self._params.gather(sampled_rows, params)
        inputs = {
            "input_ids": np.concatenate(tokens),
            "positions": positions.astype(np.int32),
            "out_loc": pages * page_size + positions % page_size,
            "sample_rows": (starts + lens - 1)[sampled].astype(np.int64),
        }
        if scored_rows is not None:
            inputs["sample_rows"] = np.concatenate((inputs["sample_rows"], scored_rows))
        rest = {
            "token_loc": table_rows * self._pool_width + positions,
            "table_idx": host.table_idx,
            "seq_lens": host.seq_lens,
            "cu_seqlens_q": np.concatenate(([0], np.cumsum(lens))).astype(np.int32),
            "write_loc": sampled_rows.astype(np.int64) * self._pool_width + host.seq_lens[sampled],
            "sample_positions": host.seq_lens[sampled],
            **params,
        }
        if size is None:
            views = self._upload({**inputs, **rest, **self._page_updates(host)})
        else:
            filled = self._fill_slot(self.prefill_slot(size), inputs)
            views = self._upload({**rest, **self._page_updates(host)}) | filled
        self._write_page_table(views)
        batch.padded_size = batch.size
        for name in (*inputs, "table_idx", "seq_lens", "cu_seqlens_q"):
            setattr(batch, name, views[name])
        batch.max_seqlen_q = int(lens.max())
        return StepTensors(
            token_loc=views["token_loc"],
            write_loc=views["write_loc"],
            sampling=sampling_inputs(views, views["sample_positions"]),
        )

    def prefill_slot(self, size: int) -> PrefillSlot:
        """Return the fixed inputs of a captured prefill of ``size`` tokens.

        All slots share one buffer, so the first one asked for must be the largest.
        """
        if self._prefill is None:
            self._prefill = Staging(PrefillSlot.layout(size).num_bytes, self._device)
        found = self._prefill_slots.get(size)
        if found is None:
            found = self._prefill_slots[size] = PrefillSlot(size, self._prefill)
        return found

    def load_dummy_prefill(self, size: int) -> Batch:
        """Make every token of a slot padding, and return a batch over it, for a capture."""
        slot = self.prefill_slot(size)
        self._fill_slot(slot, {n: view[:0] for n, view in slot.host[0].items()})
        batch = Batch(reqs=[], phase="prefill")
        for name, tensor in slot.device.items():
            setattr(batch, name, tensor)
        return batch

    def _fill_slot(
        self, slot: PrefillSlot, inputs: dict[str, np.ndarray]
    ) -> dict[str, torch.Tensor]:
        """Write a captured prefill's inputs and its padding; returns views without padding."""
        assert self._prefill is not None, "a slot has a buffer"
        views = slot.host[self._prefill.acquire()]
        padding = {"out_loc": self._ctx.kv_pool.dummy_page * self._ctx.page_size}
        for name, array in inputs.items():
            views[name][: len(array)] = array
            views[name][len(array) :] = padding.get(name, 0)
        self._prefill.submit(slot.num_bytes)
        return {name: slot.device[name][: len(array)] for name, array in inputs.items()}

    def _update_page_table(self, host: StepArrays) -> None:
        """Bring the device page table up to date with the pages given out for this step."""
        if updates := self._page_updates(host):
            self._write_page_table(self._upload(updates))

    def _page_updates(self, host: StepArrays) -> dict[str, np.ndarray]:
        """Return where this step's new pages go in the page table; nothing if it has none."""
        if not len(host.page_ids):
            return {}
        loc = host.page_rows.astype(np.int64) * self._max_pages + host.page_cols
        return {"page_loc": loc, "page_ids": host.page_ids}

    def _write_page_table(self, views: Mapping[str, torch.Tensor]) -> None:
        """Scatter the uploaded `_page_updates`, if there were any."""
        if "page_loc" in views:
            self._flat_page_table.index_copy_(0, views["page_loc"], views["page_ids"])

    def _upload(self, arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Copy arrays to the device in one go.

        The views are good until the next upload, which on the stream comes behind every kernel
        submitted before it.
        """
        layout = PackedLayout([Field(k, _TORCH[a.dtype], len(a)) for k, a in arrays.items()])
        if layout.num_bytes > self._bulk.num_bytes:
            self._bulk = Staging(2 * layout.num_bytes, self._device)
        views = layout.views(self._bulk.host[self._bulk.acquire()])
        for name, array in arrays.items():
            views[name].numpy()[:] = array
        self._bulk.submit(layout.num_bytes)
        return layout.views(self._bulk.device)


def _host(batch: Batch) -> StepArrays:
    """Return the scheduler's arrays."""
    assert batch.host is not None, "the scheduler sets batch.host"
    return batch.host
