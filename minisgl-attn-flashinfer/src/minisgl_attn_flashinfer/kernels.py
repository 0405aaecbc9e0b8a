"""The kernel set ``fi``: FlashInfer's norms, rope and activations.

There is no ``sample``: the contract wants a row's token to depend on its own seed and position
alone, and FlashInfer mixes the row's index into its random stream, so the same seed in another
slot of the batch would draw another token.

FlashInfer launches a block for each row and fails where there are none, so it is not asked then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from flashinfer.activation import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from flashinfer.norm import fused_add_rmsnorm, rmsnorm
from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace
from torch import Tensor

from minisgl.ops.contract import ActAndMul, KernelConfig, KernelSet
from minisgl_attn_flashinfer.modules import Installation, find_installation

DTYPES = (torch.float16, torch.bfloat16)
ROPE_HEAD_DIMS = (64, 128, 256, 512)
ROPE_ROTARY_DIMS = (16, 32, 64, 128, 256)
_ROW_BYTES = 16  # the activations load rows in pieces of this size
_NORMS_WITHOUT_NVCC = (0, 6, 13)  # since then they are compiled in-process

_Op = Callable[..., Any]  # ops have different signatures; the table's fields give each its own


class FlashInferKernelSet(KernelSet):
    """Offers the ops whose compiled module is there or can be made, in fp16 and bf16."""

    def __init__(self, config: KernelConfig) -> None:
        """Look at what this device and dtype allow."""
        is_served = config.device.type == "cuda" and config.dtype in DTYPES
        self._found = find_installation() if is_served else None

    def ops(self) -> Mapping[str, _Op]:
        """Return the ops; none for a dtype or device that FlashInfer does not serve."""
        found = self._found
        if found is None:
            return {}
        candidates: dict[str, tuple[str, _Op]] = {
            "rms_norm": ("norm", rms_norm),
            "fused_add_rms_norm": ("norm", fused_add_rms_norm),
            "rope": ("rope", rope),
            "silu_and_mul": ("silu_and_mul", gated(silu_and_mul, F.silu)),
            "gelu_and_mul": ("gelu_and_mul", gated(gelu_and_mul, F.gelu)),
            "gelu_tanh_and_mul": ("gelu_tanh_and_mul", gated(gelu_tanh_and_mul, gelu_tanh)),
        }
        return {name: op for name, (module, op) in candidates.items() if can_run(found, module)}


def can_run(found: Installation, module: str) -> bool:
    """Whether an op's module is built, can be built, or needs no CUDA compiler."""
    needs_no_nvcc = module == "norm" and found.version >= _NORMS_WITHOUT_NVCC
    return needs_no_nvcc or found.can_load(module)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm the last dimension; see `minisgl.ops.contract.RMSNorm`."""
    if not x.numel():
        return torch.empty_like(x)
    if x.dim() in (2, 3):
        out: Tensor = rmsnorm(x, weight, eps)
        return out
    flat: Tensor = rmsnorm(x.reshape(-1, x.shape[-1]), weight, eps)
    return flat.view(x.shape)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add and norm in place; see `minisgl.ops.contract.FusedAddRMSNorm`."""
    if x.numel():
        fused_add_rmsnorm(x, residual, weight, eps)
    return x, residual


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate in place; see `minisgl.ops.contract.Rope`.

    Head dimensions that FlashInfer has no kernel for are rotated in PyTorch: a kernel set learns
    them only here.
    """
    head_dim, rotary_dim = q.shape[-1], cos_sin_cache.shape[-1]
    if head_dim not in ROPE_HEAD_DIMS or rotary_dim not in ROPE_ROTARY_DIMS:
        cos, sin = cos_sin_cache[positions.long()].unsqueeze(1).chunk(2, dim=-1)
        return rotate(q, cos, sin), rotate(k, cos, sin)
    # Views where the heads of a token follow each other, as in a fused q/k/v product.
    flat_q, flat_k = q.flatten(1), k.flatten(1)
    apply_rope_with_cos_sin_cache_inplace(positions, flat_q, flat_k, head_dim, cos_sin_cache)
    return flat_q.view(q.shape), flat_k.view(k.shape)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first dimensions of ``x[num_tokens, heads, head_dim]`` in float32."""
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((rotated.to(x.dtype), x[..., 2 * half :]), dim=-1)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return GELU in its tanh approximation."""
    return F.gelu(x, approximate="tanh")


def gated(kernel: _Op, activation: Callable[[Tensor], Tensor]) -> ActAndMul:
    """Wrap an activation kernel; what it cannot load or launch is computed in PyTorch.

    Args:
        kernel: FlashInfer's function.
        activation: The same activation without the product.
    """

    def act_and_mul(x: Tensor) -> Tensor:
        has_whole_pieces = x.shape[-1] * x.element_size() % (2 * _ROW_BYTES) == 0
        if has_whole_pieces and x.is_contiguous() and x.numel():
            out: Tensor = kernel(x)
            return out
        gate, up = x.chunk(2, dim=-1)
        return activation(gate.float()).to(x.dtype) * up

    return act_and_mul
