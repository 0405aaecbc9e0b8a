"""Products by one form, whatever the table chooses, and what they should give."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl_kernels_cuda.activation import build_activations
from minisgl_kernels_cuda.linear import LinearKernels
from minisgl_kernels_cuda.linear_plans import BatchPlan, Plan, has_kernel
from minisgl_kernels_cuda.units import DeviceSize, Loader

H200 = DeviceSize(132, 227 << 10, "sm_90a")


class PlannedKernels(LinearKernels):
    """Kernels that run every product by one plan, if there is a kernel for it.

    Attributes:
        plan: The plan.
    """

    def __init__(self, loader: Loader, dtype: torch.dtype, plan: BatchPlan) -> None:
        super().__init__(loader, dtype, H200, 128, build_activations(loader, dtype))
        self.plan = plan

    def choose(self, n: int, k: int, rows: int) -> Plan | None:
        return self.plan if has_kernel(self.plan, rows) else None


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply in float64."""
    expected = x.double() @ weight.double().t()
    return expected if bias is None else expected + bias.double()
