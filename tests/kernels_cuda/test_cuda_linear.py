"""Products of few rows, on the simulator."""

from __future__ import annotations

import pytest
import torch

from minisgl_kernels_cuda.linear import CudaLinear, LinearKernels
from minisgl_kernels_cuda.units import DeviceSize, Loader
from tests.kernels_cuda.reference import BF16, F16, assert_near, make

H200 = DeviceSize(132, 227 << 10)


@pytest.mark.parametrize(
    ("dtype", "rows", "n", "k", "num_sms"),
    [
        (BF16, 1, 64, 1024, 132), (BF16, 1, 200, 1536, 1), (F16, 8, 70, 264, 1),
        (BF16, 3, 33, 2056, 132), (BF16, 9, 40, 1024, 4), (BF16, 16, 50, 1160, 2),
        (BF16, 11, 37, 520, 4), (F16, 16, 100, 5000, 1), (BF16, 2, 8, 8, 132),
    ],
)  # fmt: skip
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_of_few_rows_are_near_float64(
    loader: Loader, dtype: torch.dtype, rows: int, n: int, k: int, num_sms: int, has_bias: bool
) -> None:
    x, weight = make(rows, k, dtype=dtype), make(n, k, dtype=dtype, seed=1)
    bias = make(n, dtype=dtype, seed=2) if has_bias else None
    packed = LinearKernels(loader, dtype, DeviceSize(num_sms, 227 << 10), 16).pack_linear(
        weight, bias
    )
    expected = x.double() @ weight.double().t()
    if bias is not None:
        expected = expected + bias.double()
    assert_near(packed(x), expected, scale=k**0.5 / 16)


def test_a_row_is_the_same_whatever_rows_are_beside_it(loader: Loader) -> None:
    x, weight = make(7, 1032, dtype=BF16), make(48, 1032, dtype=BF16, seed=1)
    packed = LinearKernels(loader, BF16, H200, 16).pack_linear(weight, None)
    assert torch.equal(packed(x)[3:4], packed(x[3:4].clone()))


@pytest.mark.parametrize("case", ["many rows", "odd inputs", "no kernels wanted"])
def test_the_library_takes_what_the_kernels_do_not_serve(loader: Loader, case: str) -> None:
    rows, k = (17, 64) if case == "many rows" else (2, 63)
    x, weight = make(rows, k, dtype=BF16), make(24, k, dtype=BF16, seed=1)
    limit = 0 if case == "no kernels wanted" else 16
    packed = LinearKernels(loader, BF16, H200, limit).pack_linear(weight, None)
    assert isinstance(packed, CudaLinear)
    assert torch.equal(packed(x), torch.nn.functional.linear(x, weight))


def test_leading_dimensions_are_kept(loader: Loader) -> None:
    x, weight = make(2, 3, 64, dtype=BF16), make(24, 64, dtype=BF16, seed=1)
    packed = LinearKernels(loader, BF16, H200, 16).pack_linear(weight, None)
    assert packed(x).shape == (2, 3, 24)


def test_a_device_with_little_shared_memory_gets_small_tiles(loader: Loader) -> None:
    ada = LinearKernels(loader, BF16, DeviceSize(128, 99 << 10), 16)
    for n, k in ((4096, 1024), (1024, 3072), (5120, 5120), (151_936, 1024)):
        assert ada.plan(n, k).shared_bytes(n, k) <= 79 << 10


@pytest.mark.parametrize(
    ("n", "k", "limit"),
    [(4096, 1024, 16), (1024, 3072, 16), (151_936, 1024, 8), (5120, 5120, 8), (34_816, 5120, 0)],
)
def test_each_weight_has_the_rows_at_which_the_library_was_slower(
    loader: Loader, n: int, k: int, limit: int
) -> None:
    weight = torch.empty(n, k, dtype=BF16)
    assert LinearKernels(loader, BF16, H200, 16).row_limit(weight, None) == limit
