"""The attention contract: what the engine asks of a backend, and what it promises it.

The KV of the tokens being computed is already in the pool when ``forward`` is called: layers store
it through the kernel table (``store_kv`` or a fused op), so a backend only attends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from minisgl.errors import PluginError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from minisgl.core import Batch, Context


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How one layer attends.

    Attributes:
        sm_scale: Factor on ``q @ k`` before the softmax.
        window_left: Keys before the query's own that it sees; -1 for all. A Hugging Face
            ``sliding_window`` of W is ``window_left = W - 1``.
    """

    sm_scale: float
    window_left: int = -1


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """What a backend is built with.

    Attributes:
        context: The engine's context; ``kv_pool``, ``page_table`` and ``page_size`` are set.
        num_qo_heads: Query heads of this rank.
        num_kv_heads: KV heads of this rank; divides ``num_qo_heads``.
        head_dim: Of q, k and v.
        dtype: Of q and of the KV pool.
        device: Where everything lives.
        layers: One entry per layer, by layer id.
        max_running_reqs: Most requests of a batch.
        max_seq_len: Most tokens of a request.
        settings: The backend's own settings section, or ``None``.
    """

    context: Context
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    layers: tuple[LayerAttention, ...]
    max_running_reqs: int
    max_seq_len: int
    settings: BaseModel | None = None


class AttentionBackend(ABC):
    """Causal attention of a batch over the paged KV pool.

    ``factory(config: AttentionConfig) -> AttentionBackend``. It is asked for nothing that its
    capabilities or its probe rule out. Whatever else it cannot serve, the factory refuses with a
    `MinisglError` that says what would do; what it has taken, it computes right.

    All calls come from one thread, on the engine's stream. A backend that stages host data in
    pinned buffers waits on an event of its own before it writes to one again: under overlap the
    host runs one step ahead of the device.
    """

    @abstractmethod
    def prepare_metadata(self, batch: Batch) -> None:
        """Plan one step; called once per step before the model runs, outside graph capture.

        ``batch.host`` and the device tensors of ``batch`` are set (the copy to the device may
        still be in flight on the current stream). The backend leaves what it needs in
        ``batch.attn_metadata``.
        """

    @abstractmethod
    def forward(self, q: torch.Tensor, layer_id: int, batch: Batch) -> torch.Tensor:
        """Attend with the queries of one layer.

        Args:
            q: ``[num_tokens, num_qo_heads, head_dim]``, the last dimension contiguous. It is not
                changed.
            layer_id: Which layer; selects scale, window and the layer's part of the pool.
            batch: The batch given to `prepare_metadata`. Query tokens of a request are its last
                positions: token i of a request with ``n`` new and ``m`` total tokens sees keys
                ``0 … m - n + i``, less what the window hides.

        Returns:
            ``[num_tokens, num_qo_heads, head_dim]`` of q's dtype, contiguous. Rows of padding
            hold finite numbers.
        """

    def forward_into(self, out: torch.Tensor, q: torch.Tensor, layer_id: int, batch: Batch) -> None:
        """Do `forward` into memory that is given: where captured pieces of a prefill read from.

        A backend that can write there itself saves a copy by overriding this.

        Args:
            out: ``[num_tokens, num_qo_heads, head_dim]`` of q's dtype, contiguous, at a multiple
                of 16 bytes. It does not overlap with ``q``.
            q: See `forward`, as are the others.
            layer_id: Which layer.
            batch: The batch.
        """
        out.copy_(self.forward(q, layer_id, batch))

    def init_graph(self, max_batch_size: int) -> None:
        """Get ready for decode graphs of up to ``max_batch_size`` rows.

        Called once before the first capture, only when ``has_graph_capture``.
        """
        raise _cannot_capture(self)

    def prepare_for_capture(self, batch: Batch) -> None:
        """Like `prepare_metadata` for a decode batch whose ``forward`` will now be captured.

        The batch's device tensors are the fixed buffers that every replay reads. The metadata left
        here is what the graph keeps, so whatever varies must live in fixed buffers.
        """
        raise _cannot_capture(self)

    def prepare_for_replay(self, batch: Batch) -> None:
        """Bring the fixed buffers up to date before a graph of ``batch.padded_size`` is replayed.

        Called instead of `prepare_metadata`. Device tensors of the batch are the fixed buffers.
        """
        raise _cannot_capture(self)


def _cannot_capture(backend: AttentionBackend) -> PluginError:
    return PluginError(
        f"{type(backend).__name__} does not capture graphs, and its spec does not say so: it needs "
        "Capabilities(has_graph_capture=False)"
    )
