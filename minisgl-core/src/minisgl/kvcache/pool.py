"""The paged KV pool: one big tensor of keys and one of values, cut into pages."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from minisgl.device import map_zeros


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Size of a pool on one rank.

    Attributes:
        num_layers: Layers with KV.
        num_pages: Pages that requests can use.
        page_size: Tokens of a page.
        num_kv_heads: KV heads of this rank.
        head_dim: Of each head.
    """

    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int

    def page_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one page over all layers, keys and values."""
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim
        return per_token * self.page_size * dtype.itemsize


class KVPool:
    """Keys and values of all layers, ``[num_layers, num_pages + 1, page_size, heads, head_dim]``.

    The last page is the dummy page, which padding rows read and write and no request owns. The
    pool is zeroed: kernels that load whole pages multiply what lies behind a sequence's end by 0,
    which must not be NaN.
    """

    def __init__(self, shape: PoolShape, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the pool."""
        self.shape = shape
        size = (
            2,
            shape.num_layers,
            shape.num_pages + 1,
            shape.page_size,
            shape.num_kv_heads,
            shape.head_dim,
        )
        self._buffer = _zeros(size, dtype, device)
        self._k = list(self._buffer[0].unbind(0))
        self._v = list(self._buffer[1].unbind(0))
        self._flat_k = [k.flatten(0, 1) for k in self._k]
        self._flat_v = [v.flatten(0, 1) for v in self._v]

    @property
    def dummy_page(self) -> int:
        """Number of the page for padding rows."""
        return self.shape.num_pages

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool."""
        return self._buffer.nbytes

    def k_cache(self, layer_id: int) -> torch.Tensor:
        """Keys of a layer, ``[num_pages + 1, page_size, num_kv_heads, head_dim]``; a view."""
        return self._k[layer_id]

    def v_cache(self, layer_id: int) -> torch.Tensor:
        """Values of a layer, the same shape; a view."""
        return self._v[layer_id]

    def k_slots(self, layer_id: int) -> torch.Tensor:
        """Keys of a layer by slot, ``[num_slots, num_kv_heads, head_dim]``; a view."""
        return self._flat_k[layer_id]

    def v_slots(self, layer_id: int) -> torch.Tensor:
        """Values of a layer by slot, the same shape; a view."""
        return self._flat_v[layer_id]


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros; on a CPU ones that take memory only once they are written."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    return map_zeros(prod(size) * dtype.itemsize).view(dtype).view(size)
