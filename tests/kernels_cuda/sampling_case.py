"""Rows to sample, with the torch sampler as the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.ops.contract import SamplingInputs


def make_inputs(
    num_rows: int,
    temperature: float = 1.0,
    top_k: int = 1 << 30,
    top_p: float = 1.0,
    min_p: float = 0.0,
    device: str = "cpu",
) -> SamplingInputs:
    """Return rows of one kind, each with its own seed and position."""

    def full(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device=device)

    rows = torch.arange(num_rows, device=device)
    return SamplingInputs(
        full(temperature, torch.float32), full(top_k, torch.int32), full(top_p, torch.float32),
        full(min_p, torch.float32), rows * 7919 - 5, (rows * 31 + 1).to(torch.int32),
    )  # fmt: skip


def logits_of(
    num_rows: int, vocab: int, dtype: torch.dtype, spread: float = 3.0, device: str = "cpu"
) -> Tensor:
    """Return normal logits; in 16 bits many are equal."""
    generator = torch.Generator().manual_seed(num_rows * 100_003 + vocab)
    return (torch.randn(num_rows, vocab, generator=generator) * spread).to(device, dtype)
