"""Products by one form, whatever the table chooses, and what they should give."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl_kernels_cuda.activation import build_activations
from minisgl_kernels_cuda.linear import LargeProduct, LinearKernels, Weight
from minisgl_kernels_cuda.linear_plans import BatchPlan, Plan, has_kernel
from minisgl_kernels_cuda.linear_wide import MAX_WIDE_ROWS
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


class LargeKernels(LinearKernels):
    """Kernels that leave every product to that of many rows, or all to that of wide weights.

    Attributes:
        may_refuse: Whether weights that it does not take may go to the library.
    """

    def __init__(
        self, loader: Loader, dtype: torch.dtype, device: DeviceSize = H200, is_wide: bool = False
    ) -> None:
        super().__init__(loader, dtype, device, 0, build_activations(loader, dtype), uses_many=True)
        self.may_refuse = False
        self._is_wide = is_wide

    def many_rows(self, n: int, k: int, is_gated: bool) -> range:
        return range(0) if self._is_wide else range(1, 10_000)

    def wide_rows(self, n: int, k: int) -> range:
        return range(1, MAX_WIDE_ROWS + 1) if self._is_wide else range(0)

    def large(self, of: Weight) -> list[LargeProduct]:
        products = super().large(of)
        assert products or self.may_refuse, f"{tuple(of.weight.shape)} is refused"
        return products


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply in float64."""
    expected = x.double() @ weight.double().t()
    return expected if bias is None else expected + bias.double()
