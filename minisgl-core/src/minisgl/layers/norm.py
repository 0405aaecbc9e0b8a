"""Root-mean-square norms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from minisgl.layers.base import BaseOP, LoadTarget

if TYPE_CHECKING:
    from minisgl.models.contract import ModelBuild
    from minisgl.ops.contract import FusedAddRMSNorm


class RMSNorm(BaseOP):
    """A norm over the last dimension, alone or with the residual add before it."""

    def __init__(self, build: ModelBuild, size: int) -> None:
        """Allocate ``weight[size]``."""
        self.weight = build.empty(size)
        self.eps = build.config.rms_norm_eps
        self._rms_norm = build.kernels.rms_norm
        self._fused_add_rms_norm = build.kernels.fused_add_rms_norm
        self._sum_add_norm = _sum_add_norm(build)

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

    def forward_sum_add(
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Do `forward_add` with the sum over ranks of ``x``, of which each rank has a part."""
        return self._sum_add_norm(x, residual, self.weight, self.eps)


def _sum_add_norm(build: ModelBuild) -> FusedAddRMSNorm:
    """Return what sums over ranks, adds and norms, in as few kernels as the backends can."""
    add_norm, comm = build.kernels.fused_add_rms_norm, build.comm
    if comm.size == 1:
        return add_norm
    all_reduce, fused = comm.all_reduce, comm.all_reduce_add_norm

    def one_by_one(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return add_norm(all_reduce(x), residual, weight, eps)

    def in_one(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert fused is not None, "it was asked for when the model was built"
        done = fused(x, residual, weight, eps)
        return one_by_one(x, residual, weight, eps) if done is None else done

    return one_by_one if fused is None else in_one
