"""One backend for prefill and others for decode batches, small and large, as one backend."""

from __future__ import annotations

import torch

from minisgl.attention.contract import AttentionBackend
from minisgl.core import Batch
from minisgl.plugin.spec import SMALL_DECODE_REQS


class SplitAttentionBackend(AttentionBackend):
    """Delegates by the phase of the batch, and by the requests of a decode batch."""

    def __init__(
        self,
        prefill: AttentionBackend,
        decode: AttentionBackend,
        large_decode: AttentionBackend | None = None,
    ) -> None:
        """Combine backends over the same pool, page size and dtype.

        Args:
            prefill: For prefill batches.
            decode: For decode batches of up to `SMALL_DECODE_REQS` rows, padding included.
            large_decode: For larger ones; ``None`` for the same as ``decode``.
        """
        self.prefill = prefill
        self.decode = decode
        self.large_decode = large_decode or decode

    def prepare_metadata(self, batch: Batch) -> None:
        """Let the backend of this batch plan the step."""
        self._of(batch).prepare_metadata(batch)

    def forward(self, q: torch.Tensor, layer_id: int, batch: Batch) -> torch.Tensor:
        """Attend with the backend of this batch."""
        return self._of(batch).forward(q, layer_id, batch)

    def forward_into(self, out: torch.Tensor, q: torch.Tensor, layer_id: int, batch: Batch) -> None:
        """Attend with the backend of this batch, into ``out``."""
        self._of(batch).forward_into(out, q, layer_id, batch)

    def init_graph(self, max_batch_size: int) -> None:
        """Get the decode backends ready for graphs."""
        if self.large_decode is self.decode:
            self.decode.init_graph(max_batch_size)
            return
        self.decode.init_graph(min(max_batch_size, SMALL_DECODE_REQS))
        if max_batch_size > SMALL_DECODE_REQS:
            self.large_decode.init_graph(max_batch_size)

    def prepare_for_capture(self, batch: Batch) -> None:
        """Delegate to the decode backend of this batch."""
        self._of(batch).prepare_for_capture(batch)

    def prepare_for_replay(self, batch: Batch) -> None:
        """Delegate to the decode backend of this batch."""
        self._of(batch).prepare_for_replay(batch)

    def _of(self, batch: Batch) -> AttentionBackend:
        if batch.is_prefill:
            return self.prefill
        return self.decode if batch.padded_size <= SMALL_DECODE_REQS else self.large_decode
