"""Embedding look-up and the KV store, as ops."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_kernels_cuda.units import MEMORY, Loader

_PIECE_BYTES = 16
_MAX_THREADS = 256


class RowMoves:
    """``embedding`` and ``store_kv``; they copy bytes, so the element type does not matter."""

    def __init__(self, loader: Loader) -> None:
        """Load the kernels."""
        launches = loader.load(MEMORY, torch.bfloat16)
        self._embedding = launches["embedding"]
        self._store_kv = launches["store_kv"]

    def embedding(self, ids: Tensor, weight: Tensor, vocab_start: int) -> Tensor:
        """Look up rows; see `minisgl.ops.contract.Embedding`."""
        num_rows, hidden_size = weight.shape
        num_pieces, rest = divmod(hidden_size * weight.element_size(), _PIECE_BYTES)
        if rest or ids.dtype != torch.int32 or not ids.is_contiguous() or not _is_dense(weight):
            return _embedding_in_torch(ids, weight, vocab_start)
        out = torch.empty((ids.shape[0], hidden_size), dtype=weight.dtype, device=weight.device)
        if ids.shape[0]:
            self._embedding(
                (ids.shape[0], 1), _block(num_pieces),
                out.data_ptr(), ids.data_ptr(), weight.data_ptr(), vocab_start, num_rows,
                num_pieces,
            )  # fmt: skip
        return out

    def store_kv(
        self, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, out_loc: Tensor
    ) -> None:
        """Scatter rows; see `minisgl.ops.contract.StoreKV`."""
        num_tokens, num_heads, head_dim = k.shape
        size = k.element_size()
        num_pieces, rest = divmod(num_heads * head_dim * size, _PIECE_BYTES)
        pools = _is_dense(k_pool) and _is_dense(v_pool)
        if rest or not pools or not _has_whole_rows(k) or not _has_whole_rows(v):
            k_pool.index_copy_(0, out_loc, k)
            v_pool.index_copy_(0, out_loc, v)
            return
        if num_tokens:
            self._store_kv(
                (num_tokens, 2), _block(num_pieces),
                k.data_ptr(), v.data_ptr(), k_pool.data_ptr(), v_pool.data_ptr(),
                out_loc.data_ptr(), k.stride(0) * size // _PIECE_BYTES,
                v.stride(0) * size // _PIECE_BYTES, num_pieces,
            )  # fmt: skip


def _embedding_in_torch(ids: Tensor, weight: Tensor, vocab_start: int) -> Tensor:
    local = ids - vocab_start
    is_outside = (local < 0) | (local >= weight.shape[0])
    rows = F.embedding(local.masked_fill(is_outside, 0), weight)
    return rows.masked_fill_(is_outside.unsqueeze(-1), 0)


def _block(num_pieces: int) -> tuple[int, int]:
    """Return enough threads for a row, in whole warps."""
    return min(_MAX_THREADS, 32 * -(-num_pieces // 32)), 1


def _is_dense(x: Tensor) -> bool:
    return x.is_contiguous() and x.data_ptr() % _PIECE_BYTES == 0


def _has_whole_rows(x: Tensor) -> bool:
    """Whether the heads of a token of ``x[num_tokens, heads, head_dim]`` follow each other."""
    is_row = x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2])
    bytes_apart = x.stride(0) * x.element_size()
    return is_row and bytes_apart % _PIECE_BYTES == 0 and x.data_ptr() % _PIECE_BYTES == 0
