"""The norms, as ops."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_kernels_cuda.units import NORM, Loader, piece_size

_WARP = 32
_MAX_THREADS = 1024
# Beyond so many threads of a row, its warps wait for each other longer than for memory.
_FEW_THREADS = 512
# A row of one warp leaves most of a block free, so it holds so many.
_SHORT_ROWS = 4


class Norms:
    """``rms_norm`` and ``fused_add_rms_norm`` of one element type."""

    def __init__(self, loader: Loader, dtype: torch.dtype) -> None:
        """Load the kernels."""
        self._dtype = dtype
        self._piece = piece_size(dtype)
        launches = loader.load(NORM, dtype)
        self._plain = {p: launches[f"rms_norm_{p}"] for p in (1, 2, 4)}
        self._fused = {p: launches[f"fused_add_rms_norm_{p}"] for p in (1, 2, 4)}

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Norm the last dimension; see `minisgl.ops.contract.RMSNorm`."""
        n = x.shape[-1]
        shape = self._shape(n)
        if shape is None or not self._is_aligned(x, weight) or x.dim() > 3:
            return F.rms_norm(x, (n,), weight, eps)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        num_rows = x.numel() // n
        if not num_rows:
            return out
        pieces, block = shape
        num_inner = x.shape[1] if x.dim() == 3 else 1
        outer = x.stride(0) if x.dim() > 1 else 0
        inner = x.stride(1) if x.dim() == 3 else 0
        self._plain[pieces](
            (-(-num_rows // block[1]), 1), block,
            out.data_ptr(), x.data_ptr(), weight.data_ptr(), outer, inner, num_inner,
            num_rows, n, eps,
        )  # fmt: skip
        return out

    def fused_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Add and norm in place; see `minisgl.ops.contract.FusedAddRMSNorm`."""
        n = x.shape[-1]
        shape = self._shape(n)
        is_dense = x.is_contiguous() and residual.is_contiguous()
        if shape is None or not is_dense or not self._is_aligned(x, residual, weight):
            residual.add_(x)
            return F.rms_norm(residual, (n,), weight, eps), residual
        num_rows = x.numel() // n
        if num_rows:
            pieces, block = shape
            self._fused[pieces](
                (-(-num_rows // block[1]), 1), block,
                x.data_ptr(), residual.data_ptr(), weight.data_ptr(), num_rows, n, eps,
            )  # fmt: skip
        return x, residual

    def _shape(self, n: int) -> tuple[int, tuple[int, int]] | None:
        """Return pieces per thread and the block for rows of ``n``; ``None`` where none fits."""
        if n % self._piece:
            return None
        num_pieces = n // self._piece
        if num_pieces <= _WARP:
            return 1, (_WARP, _SHORT_ROWS)
        for pieces in (1, 2, 4):
            num_threads = _WARP * -(-num_pieces // (_WARP * pieces))
            if num_threads <= (_FEW_THREADS if pieces < 4 else _MAX_THREADS):
                return pieces, (num_threads, 1)
        return None

    def _is_aligned(self, *tensors: Tensor) -> bool:
        """Whether every row can be read 16 bytes at a time."""
        return all(
            t.data_ptr() % 16 == 0
            and t.stride(-1) == 1
            and all(stride % self._piece == 0 for stride in t.stride()[:-1])
            and t.dtype == self._dtype
            for t in tensors
        )
