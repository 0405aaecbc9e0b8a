"""Batches as scheduler and engine make them, over a page table that is given out beforehand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minisgl.core import Batch, Req, SamplingParams, StepArrays


class Step(NamedTuple):
    """What one request does in a step: row of the page table, tokens before it and after it."""

    row: int
    cached_len: int
    seq_len: int


def newest(seq_lens: Iterable[int]) -> list[Step]:
    """Return the steps that compute the last token of rows 0, 1 and so on."""
    return [Step(row, seq_len - 1, seq_len) for row, seq_len in enumerate(seq_lens)]


class PagedBatches:
    """Makes batches of requests whose pages and tokens are known.

    Attributes:
        page_table: ``[max_reqs, max_pages]`` int32 on the host.
        device_table: The same on the device, and a row of padding: ``[max_reqs + 1, max_pages]``.
        tokens: ``[max_reqs + 1, max_seq_len]`` int32 token ids of each row; zeros unless set.
    """

    def __init__(
        self,
        page_table: np.ndarray,
        dummy_page: int,
        page_size: int,
        max_seq_len: int,
        device: torch.device,
    ) -> None:
        """Take the pages of every request.

        Args:
            page_table: ``[max_reqs, max_pages]`` int32.
            dummy_page: What padding reads and writes.
            page_size: Tokens of a page.
            max_seq_len: Most tokens of a request.
            device: Where batches live.
        """
        self.page_table = page_table
        self.max_reqs, max_pages = page_table.shape
        self.max_seq_len = max_seq_len
        self._page_size = page_size
        self._device = device
        dummy_row = np.full((1, max_pages), dummy_page, dtype=np.int32)
        table = np.concatenate((page_table, dummy_row))
        self.device_table = torch.from_numpy(table).to(device)
        self.tokens = np.zeros((self.max_reqs + 1, max_seq_len), dtype=np.int32)

    def prefill(self, steps: Sequence[Step], is_sampled: Sequence[bool] | None = None) -> Batch:
        """Make a prefill batch of any number of tokens per request.

        Args:
            steps: What each request does.
            is_sampled: Whether the logits of its last token are wanted; by default of all.
        """
        lens = [step.seq_len - step.cached_len for step in steps]
        batch = self._batch(steps)
        batch.is_sampled = [True] * len(steps) if is_sampled is None else list(is_sampled)
        batch.padded_size = len(steps)
        self._set_tensors(batch, steps)
        batch.cu_seqlens_q = self._int32([0, *np.cumsum(lens).tolist()])
        batch.max_seqlen_q = max(lens)
        last = (np.cumsum(lens) - 1)[np.array(batch.is_sampled, dtype=bool)]
        batch.sample_rows = torch.from_numpy(last).to(self._device, torch.int64)
        return batch

    def decode(self, steps: Sequence[Step], padded_size: int = 0) -> Batch:
        """Make a decode batch, padded to a number of rows."""
        size = max(padded_size, len(steps))
        batch = self._batch(steps, phase="decode")
        batch.padded_size = size
        padding = [Step(self.max_reqs, 0, 1)] * (size - len(steps))
        self._set_tensors(batch, [*steps, *padding])
        batch.cu_seqlens_q = self._int32(range(size + 1))
        return batch

    def slots(self, step: Step) -> np.ndarray:
        """Return where the KV of a step's new tokens goes, ``[num_tokens]`` int64."""
        at = np.arange(step.cached_len, step.seq_len)
        pages = self.device_table[step.row].cpu().numpy()[at // self._page_size]
        return pages.astype(np.int64) * self._page_size + at % self._page_size

    def _batch(self, steps: Sequence[Step], phase: str = "prefill") -> Batch:
        params = SamplingParams()
        reqs = []
        for uid, step in enumerate(steps):
            prompt = self.tokens[step.row, : step.seq_len]
            req = Req(uid, prompt, self.max_seq_len + 1, params)
            req.table_idx, req.cached_len = step.row, step.cached_len
            reqs.append(req)
        table = np.array(steps, dtype=np.int32).reshape(-1, 3)
        rows, cached, total = (column.copy() for column in table.T)
        none = np.empty(0, np.int32)
        host = StepArrays(rows, cached, total, none, none, none, self.page_table)
        return Batch(reqs, "decode" if phase == "decode" else "prefill", host=host)

    def _set_tensors(self, batch: Batch, steps: Sequence[Step]) -> None:
        """Set the device tensors as the engine does."""
        spans = [(step.row, slice(step.cached_len, step.seq_len)) for step in steps]
        positions = [np.arange(span.start, span.stop) for _, span in spans]
        batch.positions = self._int32(np.concatenate(positions))
        batch.input_ids = self._int32(np.concatenate([self.tokens[row, at] for row, at in spans]))
        slots = np.concatenate([self.slots(step) for step in steps])
        batch.out_loc = torch.from_numpy(slots).to(self._device)
        batch.table_idx = self._int32([step.row for step in steps])
        batch.seq_lens = self._int32([step.seq_len for step in steps])

    def _int32(self, values: Sequence[int] | np.ndarray | range) -> Tensor:
        return torch.tensor(np.array(values, dtype=np.int32), device=self._device)


def scattered_pages(max_reqs: int, max_pages: int, num_spare: int, seed: int) -> np.ndarray:
    """Give each of ``max_reqs`` requests ``max_pages`` pages in no order, ``num_spare`` to nobody.

    Returns:
        ``[max_reqs, max_pages]`` int32.
    """
    num_used = max_reqs * max_pages
    pages = np.random.default_rng(seed).permutation(num_used + num_spare)[:num_used]
    return pages.astype(np.int32).reshape(max_reqs, max_pages)
