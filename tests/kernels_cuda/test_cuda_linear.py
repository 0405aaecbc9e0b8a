"""Products of few rows, on the simulator."""

from __future__ import annotations

import pytest
import torch

from minisgl_kernels_cuda.linear import CudaLinear, LinearKernels
from minisgl_kernels_cuda.units import Loader
from tests.kernels_cuda.reference import BF16, F16, assert_near, make




@pytest.mark.parametrize(
    ("dtype", "rows", "n", "k", "num_sms"),
    [
        (BF16, 1, 64, 1024, 132), (BF16, 1, 200, 1536, 1), (F16, 8, 70, 264, 1),
        (BF16, 3, 33, 2056, 132), (BF16, 9, 40, 1024, 4), (BF16, 16, 50, 1160, 2),
        (BF16, 27, 37, 520, 4), (F16, 32, 100, 2048, 1), (BF16, 2, 8, 8, 132),
    ],
)  # fmt: skip
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_of_few_rows_are_near_float64(
    loader: Loader, dtype: torch.dtype, rows: int, n: int, k: int, num_sms: int, has_bias: bool
) -> None:
    x, weight = make(rows, k, dtype=dtype), make(n, k, dtype=dtype, seed=1)
    bias = make(n, dtype=dtype, seed=2) if has_bias else None
    packed = LinearKernels(loader, dtype, num_sms, 32).pack_linear(weight, bias)
    expected = x.double() @ weight.double().t()
    if bias is not None:
        expected = expected + bias.double()
    assert_near(packed(x), expected, scale=k**0.5 / 16)


def test_a_row_is_the_same_whatever_rows_are_beside_it(loader: Loader) -> None:
    x, weight = make(7, 1032, dtype=BF16), make(48, 1032, dtype=BF16, seed=1)
    packed = LinearKernels(loader, BF16, 132, 32).pack_linear(weight, None)
    assert torch.equal(packed(x)[3:4], packed(x[3:4].clone()))


@pytest.mark.parametrize("case", ["many rows", "odd inputs", "no kernels wanted"])
def test_the_library_takes_what_the_kernels_do_not_serve(loader: Loader, case: str) -> None:
    rows, k = (33, 64) if case == "many rows" else (2, 63)
    x, weight = make(rows, k, dtype=BF16), make(24, k, dtype=BF16, seed=1)
    limit = 0 if case == "no kernels wanted" else 32
    packed = LinearKernels(loader, BF16, 132, limit).pack_linear(weight, None)
    assert isinstance(packed, CudaLinear)
    assert torch.equal(packed(x), torch.nn.functional.linear(x, weight))


def test_leading_dimensions_are_kept(loader: Loader) -> None:
    x, weight = make(2, 3, 64, dtype=BF16), make(24, 64, dtype=BF16, seed=1)
    packed = LinearKernels(loader, BF16, 132, 32).pack_linear(weight, None)
    assert packed(x).shape == (2, 3, 24)
