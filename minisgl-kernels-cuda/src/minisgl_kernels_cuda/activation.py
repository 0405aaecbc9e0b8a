"""The gated activations, as ops."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.ops.contract import ActAndMul
from minisgl_kernels_cuda.units import ACTIVATION, Launch, Loader, piece_size

_THREADS = 256

_IN_TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "silu_and_mul": F.silu,
    "gelu_and_mul": F.gelu,
    "gelu_tanh_and_mul": lambda x: F.gelu(x, approximate="tanh"),
}


def build_activations(loader: Loader, dtype: torch.dtype) -> dict[str, ActAndMul]:
    """Load the kernels of one element type and return the ops by name."""
    launches = loader.load(ACTIVATION, dtype)
    return {name: _act_and_mul(launch, dtype, _IN_TORCH[name]) for name, launch in launches.items()}


def _act_and_mul(
    launch: Launch, dtype: torch.dtype, activation: Callable[[Tensor], Tensor]
) -> ActAndMul:
    """Make one op; rows that are no multiple of 16 bytes are computed in PyTorch."""
    piece = piece_size(dtype)

    def act_and_mul(x: Tensor) -> Tensor:
        n = x.shape[-1] // 2
        if n % piece or x.dtype != dtype or not x.is_contiguous() or x.data_ptr() % 16:
            gate, up = x.chunk(2, dim=-1)
            return activation(gate) * up
        out = torch.empty((*x.shape[:-1], n), dtype=dtype, device=x.device)
        num_rows = out.numel() // n
        if num_rows:
            grid = (num_rows, -(-n // (_THREADS * piece)))
            launch(grid, (_THREADS, 1), out.data_ptr(), x.data_ptr(), n)
        return out

    return act_and_mul
