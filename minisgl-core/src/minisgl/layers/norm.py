"""Root-mean-square norms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from minisgl.layers.base import BaseOP, LoadTarget

if TYPE_CHECKING:
    from minisgl.models.contract import ModelBuild


class RMSNorm(BaseOP):
    """A norm over the last dimension, alone or with the residual add before it."""

    def __init__(self, build: ModelBuild, size: int) -> None:
        """Allocate ``weight[size]``."""
        self.weight = build.empty(size)
        self.eps = build.config.rms_norm_eps
        self._rms_norm = build.kernels.rms_norm
        self._fused_add_rms_norm = build.kernels.fused_add_rms_norm

    def own_targets(self) -> Iterator[tuple[str, LoadTarget]]:
        """Yield ``weight``."""
        yield "weight", LoadTarget(self.weight, tuple(self.weight.shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Norm ``x[..., size]``; x is kept."""
        return self._rms_norm(x, self.weight, self.eps)

    def forward_add(
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of ``x + residual`` and that sum; both inputs may be overwritten."""
        return self._fused_add_rms_norm(x, residual, self.weight, self.eps)
