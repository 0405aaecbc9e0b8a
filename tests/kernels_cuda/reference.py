"""The ops in float64, and how far a result in a dtype may be from them."""

from __future__ import annotations

import torch
from torch import Tensor

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

# Two roundings to 8, 11 and 24 bits of mantissa: each is half a unit of the last place, relative
# to the value; float32 gets more, for sums of a few thousand terms.
TOLERANCE = {BF16: 2.0**-7, F16: 2.0**-10, F32: 2.0**-18}


def assert_near(out: Tensor, expected: Tensor, scale: float = 1.0) -> None:
    """Compare with a float64 result; ``scale`` is the size of the terms that were added up."""
    tolerance = TOLERANCE[out.dtype]
    assert out.shape == expected.shape
    torch.testing.assert_close(
        out.double(), expected.double(), rtol=tolerance, atol=tolerance * scale
    )


def make(*shape: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Tensor:
    """Return normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm the last dimension in float64."""
    x64 = x.double()
    return x64 * (x64.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def rope(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate ``x[num_tokens, heads, head_dim]`` in float64."""
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[positions.long()].double().unsqueeze(1).chunk(2, dim=-1)
    a, b, rest = x.double().split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def cos_sin_cache(num_positions: int, rotary_dim: int, device: str = "cpu") -> Tensor:
    """Return a table of angles that differ in every entry."""
    frequencies = 1e4 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = torch.arange(num_positions)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float().to(device)
