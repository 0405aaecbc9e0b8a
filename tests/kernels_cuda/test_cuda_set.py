"""Which ops the set offers, and that a chain takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from minisgl.ops.contract import KernelConfig, KernelSet
from minisgl.ops.table import COMPOSED, build_kernel_table
from minisgl.ops.torch_set import TorchKernelSet
from minisgl.testing.conformance.test_kernels import NO_ROWS, Kernels
from minisgl_kernels_cuda.backend import build_ops
from minisgl_kernels_cuda.settings import CudaKernelSettings
from minisgl_kernels_cuda.units import DeviceSize, Loader
from tests.kernels_cuda.reference import BF16, F32


class SimulatedSet(KernelSet):
    """The ops on the simulator."""

    def __init__(
        self, loader: Loader, dtype: torch.dtype, settings: CudaKernelSettings | None = None
    ) -> None:
        device = DeviceSize(132, 227 << 10, "sm_90a")
        self._ops = build_ops(loader, dtype, device, settings or CudaKernelSettings())

    def ops(self) -> Mapping[str, Callable[..., Any]]:
        return self._ops


def sources_of(kernels: KernelSet, dtype: torch.dtype) -> Mapping[str, str]:
    """Return which set each op of the chain ``cuda,torch`` comes from."""
    config = KernelConfig(torch.device("cpu"), dtype)
    return build_kernel_table([("cuda", kernels), ("torch", TorchKernelSet(config))]).sources


def test_a_chain_takes_every_op_of_a_decode_step_from_the_set(loader: Loader) -> None:
    sources = sources_of(SimulatedSet(loader, BF16), BF16)
    assert {name for name, source in sources.items() if source == "torch"} == {
        "rope", "rope_rows", "apply_rope",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [(F32, CudaKernelSettings()), (BF16, CudaKernelSettings(linear_rows=0, linear_many="off"))],
)
def test_products_are_left_to_the_library(
    loader: Loader, dtype: torch.dtype, settings: CudaKernelSettings
) -> None:
    kernels = SimulatedSet(loader, dtype, settings)
    sources = sources_of(kernels, dtype)
    assert sources["pack_linear"] == "torch"
    assert sources["pack_gated_linear"] == COMPOSED


@pytest.mark.parametrize("name", NO_ROWS)
def test_no_rows_are_served_without_a_launch(loader: Loader, name: str) -> None:
    ops = SimulatedSet(loader, BF16).ops()
    kernels = Kernels(ops, BF16, torch.device("cpu"), torch.Generator())
    assert NO_ROWS[name](ops[name], kernels).shape == (0, 64)
