"""FlashInfer's norms, rope and activations as of 0.6.4: signatures and refusals, in PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.fakes.fake_paged import require

HALF_DTYPES = (torch.float16, torch.bfloat16)


def rmsnorm(
    input: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    out: Tensor | None = None,
    enable_pdl: bool | None = None,
) -> Tensor:
    del enable_pdl
    require(input.dim() in (2, 3), f"unsupported input dimension {input.dim()}", RuntimeError)
    _check_norm(input, weight)
    result = torch.empty(input.shape, dtype=input.dtype) if out is None else out
    require(result.shape == input.shape, "out has the wrong shape", RuntimeError)
    result.copy_(_norm(input.float(), weight, eps))
    return result


def fused_add_rmsnorm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """``residual += input``, then ``input = norm(residual)``, from the unrounded sum."""
    del enable_pdl
    require(input.dim() == 2, "input must be [rows, hidden]", RuntimeError)
    require(residual.shape == input.shape, "residual and input differ in shape", RuntimeError)
    require(residual.stride(-1) == 1, "residual must be contiguous", RuntimeError)
    _check_norm(input, weight)
    total = input.float() + residual.float()
    residual.copy_(total)
    input.copy_(_norm(total, weight, eps))


def apply_rope_with_cos_sin_cache_inplace(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
) -> None:
    require(cos_sin_cache.dtype == torch.float32, "cos_sin_cache should be float32")
    is_int = positions.dtype in (torch.int32, torch.int64)
    require(is_int and positions.dim() == 1, "positions must be one-dimensional int32 or int64")
    require(head_size in (64, 128, 256, 512), f"unsupported head_dim {head_size}", RuntimeError)
    rotary_dim = cos_sin_cache.shape[-1]
    is_served = rotary_dim in (16, 32, 64, 128, 256) and rotary_dim <= head_size
    require(is_served, f"unsupported rotary_dim {rotary_dim}", RuntimeError)
    cos, sin = cos_sin_cache[positions.long()].unsqueeze(1).chunk(2, dim=-1)
    for tensor in (query, key):
        require(tensor.dtype in HALF_DTYPES, f"unsupported dtype {tensor.dtype}", RuntimeError)
        require(tensor.dim() == 2, "query and key are [tokens, heads * head_size]", RuntimeError)
        heads = tensor.view(len(positions), -1, head_size)[..., :rotary_dim]
        x = heads.float()
        first, second = x.chunk(2, dim=-1) if is_neox else (x[..., ::2], x[..., 1::2])
        turned = (first * cos - second * sin, second * cos + first * sin)
        joined = torch.cat(turned, -1) if is_neox else torch.stack(turned, -1).flatten(-2)
        heads.copy_(joined)


def silu_and_mul(
    input: Tensor,
    out: Tensor | None = None,
    enable_pdl: bool | None = None,
) -> Tensor:
    del enable_pdl
    return _gated(input, out, F.silu)


def gelu_and_mul(
    input: Tensor,
    out: Tensor | None = None,
    enable_pdl: bool | None = None,
) -> Tensor:
    del enable_pdl
    return _gated(input, out, F.gelu)


def gelu_tanh_and_mul(
    input: Tensor,
    out: Tensor | None = None,
    enable_pdl: bool | None = None,
) -> Tensor:
    del enable_pdl
    return _gated(input, out, lambda x: F.gelu(x, approximate="tanh"))


def _gated(x: Tensor, out: Tensor | None, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """The first half is activated."""
    require(x.dtype in HALF_DTYPES, f"unsupported dtype {x.dtype}", RuntimeError)
    require(x.is_contiguous(), "input must be contiguous", RuntimeError)
    require(x.shape[-1] % 2 == 0, "the last dimension must be even")
    is_aligned = x.shape[-1] * x.element_size() % 32 == 0
    require(is_aligned, "the pointers must be multiple of 16 bytes")
    require(x.numel() > 0, "Failed to launch kernel: invalid configuration argument", RuntimeError)
    gate, up = x.float().chunk(2, dim=-1)
    result = torch.empty(up.shape, dtype=x.dtype) if out is None else out
    require(result.shape == up.shape, "out has the wrong shape", AssertionError)
    result.copy_(activation(gate) * up)
    return result


def _check_norm(x: Tensor, weight: Tensor) -> None:
    require(x.dtype in HALF_DTYPES, f"unsupported dtype {x.dtype}", RuntimeError)
    require(weight.dtype == x.dtype, "weight and input differ in dtype", RuntimeError)
    require(x.stride(-1) == 1, "the last dimension of input must be contiguous", RuntimeError)
    require(weight.shape == x.shape[-1:], "weight must be [hidden]", RuntimeError)
    require(x.numel() > 0, "norm failed: invalid configuration argument", RuntimeError)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return x * scale * weight.float()
