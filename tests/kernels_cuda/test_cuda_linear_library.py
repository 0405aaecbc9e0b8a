"""Products of long weights that go to the library another way."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from minisgl.ops.contract import GatedActivation
from minisgl_kernels_cuda.linear import Weight
from minisgl_kernels_cuda.linear_library import LibraryLinear
from minisgl_kernels_cuda.linear_table import library_rows
from minisgl_kernels_cuda.units import DeviceSize, Loader
from tests.kernels_cuda.planned_kernels import H200, LargeKernels
from tests.kernels_cuda.reference import BF16, make


class LibraryKernels(LargeKernels):
    """Kernels that send 3 to 5 rows of every weight there."""

    def __init__(self, loader: Loader, device: DeviceSize = H200) -> None:
        super().__init__(loader, BF16, device)
        self.may_refuse = True

    def many_rows(self, n: int, k: int, is_gated: bool) -> range:
        return range(0)

    def library_rows(self, n: int, k: int) -> range:
        return range(3, 6)


@pytest.mark.parametrize("shape", [(3,), (5,), (2, 2)], ids=str)
def test_it_gives_what_the_library_gives(loader: Loader, shape: tuple[int, ...]) -> None:
    x, weight = make(*shape, 64, dtype=BF16), make(24, 64, dtype=BF16, seed=1)
    packed = LibraryKernels(loader).pack_linear(weight, None)
    torch.testing.assert_close(packed(x), F.linear(x, weight))


def test_plain_products_of_its_rows_go_there(loader: Loader) -> None:
    weight = make(24, 64, dtype=BF16)
    (product,) = LibraryKernels(loader).large(Weight(weight, None))
    assert isinstance(product.run, LibraryLinear)
    assert product.rows == range(3, 6)


@pytest.mark.parametrize(("has_bias", "activation"), [(True, None), (False, "gelu")])
def test_products_with_a_bias_or_an_activation_do_not(
    loader: Loader, has_bias: bool, activation: GatedActivation | None
) -> None:
    weight, bias = make(32, 64, dtype=BF16), make(32, dtype=BF16) if has_bias else None
    assert not LibraryKernels(loader).large(Weight(weight, bias, activation))


def test_only_the_architecture_that_was_measured_does_so(loader: Loader) -> None:
    kernels = LibraryKernels(loader, DeviceSize(148, 227 << 10, "sm_100"))
    assert not kernels.large(Weight(make(24, 64, dtype=BF16), None))


@pytest.mark.parametrize(
    ("n", "k", "rows"),
    # 14B: down, o, q/k/v, gate and up; then down of 8B and 0.6B.
    [(5120, 17_408, range(33, 129)), (5120, 5120, range(0)), (7168, 5120, range(0)),
     (34_816, 5120, range(0)), (4096, 12_288, range(33, 97)), (1024, 3072, range(0))],
)  # fmt: skip
def test_long_weights_take_the_batches_that_were_measured(n: int, k: int, rows: range) -> None:
    assert library_rows(n, k) == rows
