"""A random MoE layer for `fused`, and what it should give."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from minisgl.moe.contract import MoEConfig
from minisgl.testing.reference import Experts, assert_close, moe
from minisgl_moe_triton.backend import FusedMoEBackend, shape_of
from minisgl_moe_triton.plan import Step, TileShape
from minisgl_moe_triton.settings import FusedSettings
from minisgl_moe_triton.tables import TunedShape, TuningTable, write_table

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Sizes(NamedTuple):
    """What a layer is like."""

    num_experts: int = 8
    top_k: int = 2
    hidden_size: int = 48
    intermediate_size: int = 40
    is_renormalized: bool = True
    dtype: torch.dtype = torch.float32

    def config(self, max_num_tokens: int = 512, settings: FusedSettings | None = None) -> MoEConfig:
        return MoEConfig(*self[:6], DEVICE, max_num_tokens, settings)


class Layer:
    """Weights, and a backend that computes with them."""

    def __init__(self, sizes: Sizes, backend: FusedMoEBackend | None = None) -> None:
        self.sizes = sizes
        self.random = torch.Generator().manual_seed(0)
        hidden, inner = sizes.hidden_size, sizes.intermediate_size
        self.experts = Experts(
            self.randn(sizes.num_experts, 2 * inner, hidden, scale=hidden**-0.5),
            self.randn(sizes.num_experts, hidden, inner, scale=inner**-0.5),
            sizes.top_k,
            sizes.is_renormalized,
        )
        self.backend = backend or FusedMoEBackend(sizes.config())

    def randn(self, *size: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(size, generator=self.random) * scale
        return values.to(DEVICE, self.sizes.dtype)

    def logits(self, num_tokens: int) -> torch.Tensor:
        """Make logits of which no two of a token are equal, in any type."""
        order = torch.rand(num_tokens, self.sizes.num_experts, generator=self.random).argsort(1)
        return (order * (6 / self.sizes.num_experts) - 3).to(DEVICE, self.sizes.dtype)

    def run(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return self.backend.forward(x, logits, self.experts[0], self.experts[1])

    def check(self, num_tokens: int, logits: torch.Tensor | None = None) -> None:
        """Compare with a loop over tokens in float64."""
        x = self.randn(num_tokens, self.sizes.hidden_size)
        logits = self.logits(num_tokens) if logits is None else logits
        expected = moe(x, logits, self.experts)
        assert_close(self.run(x, logits), expected, self.sizes.dtype, "sums each token's experts")


def tiled_backend(folder: Path, sizes: Sizes, *steps: Step) -> FusedMoEBackend:
    """Build a backend with tiles of a test's choice."""
    path = folder / "table.json"
    shape = shape_of(sizes.config())
    write_table(path, TuningTable("any", (TunedShape(shape, steps),)))
    return FusedMoEBackend(sizes.config(settings=FusedSettings(table=path)))


def small_tiles(
    block_m: int = 16, group_m: int = 1, has_halves: bool = False, has_tma: bool = False
) -> Step:
    """Tiles that even a small layer needs several of in each direction."""
    tile = TileShape(16, 16, num_stages=2, group_m=group_m, has_tma=has_tma)
    return Step(1 << 30, block_m, tile, tile, has_halves)
