"""What one step's layers share, made on the device from the batch's own tensors."""

from __future__ import annotations

import torch

from minisgl.core import Batch


class StepMetadata:
    """The lengths and pages of one step; `gather` fills it on the stream of the kernels.

    Gathering the rows of the page table is left to the first layer. Inside a graph the gather is
    then captured with the layers, so a replay follows whatever the engine put into the page
    table by that point, and the host has nothing to prepare.

    Attributes:
        is_decode: One query token per request.
        seq_lens: ``[num_rows]`` int32.
        cu_seqlens_q: ``[num_rows + 1]`` int32.
        max_seqlen_q: Most query tokens of one request.
        max_seqlen_k: A bound on ``seq_lens``, a multiple of the page size.
        page_table: ``[num_rows, width]`` int32, after `gather`.
    """

    def __init__(
        self, batch: Batch, page_table: torch.Tensor, num_pages: int, page_size: int
    ) -> None:
        """Note the tensors of a batch.

        Args:
            batch: With its device tensors set.
            page_table: ``[num_table_rows, max_pages]`` int32, the engine's.
            num_pages: Columns that the batch needs.
            page_size: Tokens of a page.
        """
        assert batch.seq_lens is not None, "the engine sets seq_lens before it plans"
        assert batch.table_idx is not None, "the engine sets table_idx before it plans"
        assert batch.cu_seqlens_q is not None, "the engine sets cu_seqlens_q before it plans"
        self.is_decode = batch.is_decode
        self.seq_lens = batch.seq_lens
        self.cu_seqlens_q = batch.cu_seqlens_q
        self.max_seqlen_q = batch.max_seqlen_q
        self.max_seqlen_k = num_pages * page_size
        self.page_table = page_table.new_empty(0)
        self._table_idx = batch.table_idx
        self._source = page_table[:, :num_pages]
        self._first_layer: int | None = None
        self._cu_seqlens_k: torch.Tensor | None = None

    def gather(self, layer_id: int) -> None:
        """Look up the page-table rows, if ``layer_id`` is the first layer of a pass."""
        if self._first_layer is None:
            self._first_layer = layer_id
        if layer_id == self._first_layer:
            self.page_table = self._source.index_select(0, self._table_idx)
            self._cu_seqlens_k = None

    @property
    def cu_seqlens_k(self) -> torch.Tensor:
        """``[num_rows + 1]`` int32 sums of the lengths, made when first asked for in a pass."""
        if self._cu_seqlens_k is None:
            sums = self.seq_lens.new_zeros(len(self.seq_lens) + 1)
            torch.cumsum(self.seq_lens, dim=0, dtype=torch.int32, out=sums[1:])
            self._cu_seqlens_k = sums
        return self._cu_seqlens_k
