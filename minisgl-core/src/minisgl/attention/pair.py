"""One backend for prefill and another one for decode, as one backend."""

from __future__ import annotations

import torch

from minisgl.attention.contract import AttentionBackend
from minisgl.core import Batch


class PairAttentionBackend(AttentionBackend):
    """Delegates by the phase of the batch; graphs are the decode backend's."""

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        """Combine two backends over the same pool, page size and dtype."""
        self.prefill = prefill
        self.decode = decode

    def prepare_metadata(self, batch: Batch) -> None:
        """Let the phase's backend plan the step."""
        self._of(batch).prepare_metadata(batch)

    def forward(self, q: torch.Tensor, layer_id: int, batch: Batch) -> torch.Tensor:
        """Attend with the phase's backend."""
        return self._of(batch).forward(q, layer_id, batch)

    def init_graph(self, max_batch_size: int) -> None:
        """Get the decode backend ready for graphs."""
        self.decode.init_graph(max_batch_size)

    def prepare_for_capture(self, batch: Batch) -> None:
        """Delegate to the decode backend."""
        self.decode.prepare_for_capture(batch)

    def prepare_for_replay(self, batch: Batch) -> None:
        """Delegate to the decode backend."""
        self.decode.prepare_for_replay(batch)

    def _of(self, batch: Batch) -> AttentionBackend:
        return self.prefill if batch.is_prefill else self.decode
