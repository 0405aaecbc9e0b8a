"""Which ops the set offers, and that a chain takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from minisgl.ops.contract import KernelConfig, KernelSet
from minisgl.ops.table import COMPOSED, build_kernel_table
from minisgl.ops.torch_set import TorchKernelSet
from minisgl_kernels_cuda.backend import build_ops
from minisgl_kernels_cuda.units import DeviceSize, Loader
from tests.kernels_cuda.reference import BF16, F32


class SimulatedSet(KernelSet):
    """The ops on the simulator."""

    def __init__(self, loader: Loader, dtype: torch.dtype, linear_rows: int = 16) -> None:
        self._ops = build_ops(loader, dtype, DeviceSize(132, 227 << 10, "sm_90a"), linear_rows)

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


@pytest.mark.parametrize(("dtype", "linear_rows"), [(F32, 16), (BF16, 0)])
def test_products_are_left_to_the_library(
    loader: Loader, dtype: torch.dtype, linear_rows: int
) -> None:
    kernels = SimulatedSet(loader, dtype, linear_rows)
    sources = sources_of(kernels, dtype)
    assert sources["pack_linear"] == "torch"
    assert sources["pack_gated_linear"] == COMPOSED
