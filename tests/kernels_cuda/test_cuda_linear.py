"""Products of few rows, and what is left to the library, on the simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from minisgl_kernels_cuda.activation import build_activations
from minisgl_kernels_cuda.linear import CudaLinear, LinearKernels
from minisgl_kernels_cuda.linear_plans import BatchPlan, FewPlan, has_kernel, kernel_rows
from minisgl_kernels_cuda.linear_table import batch_rule, choose
from minisgl_kernels_cuda.units import DeviceSize, Loader
from tests.kernels_cuda.planned_kernels import H200
from tests.kernels_cuda.reference import BF16, F16, assert_near, make

A100 = DeviceSize(108, 163 << 10, "sm_80")
ADA = DeviceSize(128, 99 << 10, "sm_89")

MODEL_SHAPES = [
    (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151_936, 1024),
    (7168, 5120), (5120, 5120), (34_816, 5120), (5120, 17_408), (151_936, 5120),
]  # fmt: skip
"""Outputs and inputs of Qwen3-0.6B and 14B."""


def kernels_of(
    loader: Loader, dtype: torch.dtype, device: DeviceSize = A100, max_rows: int = 16
) -> LinearKernels:
    """Return the kernels for a device."""
    return LinearKernels(loader, dtype, device, max_rows, build_activations(loader, dtype))


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
    device = DeviceSize(num_sms, 227 << 10, "sm_80")
    packed = kernels_of(loader, dtype, device).pack_linear(weight, bias)
    expected = x.double() @ weight.double().t()
    if bias is not None:
        expected = expected + bias.double()
    assert_near(packed(x), expected, scale=k**0.5 / 16)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 96, 1024), (5, 20, 2056), (16, 42, 264)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_gated_product_is_the_activation_of_the_product(
    loader: Loader, activation: str, rows: int, n: int, k: int, has_bias: bool
) -> None:
    kernels = kernels_of(loader, BF16)
    x, weight = make(rows, k, dtype=BF16), make(n, k, dtype=BF16, seed=1) / k**0.5
    bias = make(n, dtype=BF16, seed=2) if has_bias else None
    out = kernels.pack_gated_linear(weight, bias, activation)(x)  # type: ignore[arg-type]  # one of the names
    act_and_mul = build_activations(loader, BF16)[f"{activation}_and_mul"]
    assert torch.equal(out, act_and_mul(kernels.pack_linear(weight, bias)(x)))


def test_a_gated_product_of_many_rows_is_left_to_the_library(loader: Loader) -> None:
    x, weight = make(17, 64, dtype=BF16), make(48, 64, dtype=BF16, seed=1)
    kernels = kernels_of(loader, BF16)
    expected = build_activations(loader, BF16)["silu_and_mul"](
        torch.nn.functional.linear(x, weight)
    )
    assert torch.equal(kernels.pack_gated_linear(weight, None, "silu")(x), expected)


def test_a_row_is_the_same_whatever_rows_are_beside_it(loader: Loader) -> None:
    x, weight = make(7, 1032, dtype=BF16), make(48, 1032, dtype=BF16, seed=1)
    packed = kernels_of(loader, BF16).pack_linear(weight, None)
    assert torch.equal(packed(x)[3:4], packed(x[3:4].clone()))


@pytest.mark.parametrize("case", ["many rows", "odd inputs", "no kernels wanted"])
def test_the_library_takes_what_the_kernels_do_not_serve(loader: Loader, case: str) -> None:
    rows, k = (17, 64) if case == "many rows" else (2, 63)
    x, weight = make(rows, k, dtype=BF16), make(24, k, dtype=BF16, seed=1)
    limit = 0 if case == "no kernels wanted" else 16
    packed = kernels_of(loader, BF16, max_rows=limit).pack_linear(weight, None)
    assert isinstance(packed, CudaLinear)
    assert torch.equal(packed(x), torch.nn.functional.linear(x, weight))


def test_no_rows_give_no_rows(loader: Loader) -> None:
    packed = kernels_of(loader, BF16).pack_linear(make(24, 64, dtype=BF16), None)
    assert packed(torch.empty(0, 64, dtype=BF16)).shape == (0, 24)


def test_leading_dimensions_are_kept(loader: Loader) -> None:
    x, weight = make(2, 3, 64, dtype=BF16), make(24, 64, dtype=BF16, seed=1)
    packed = kernels_of(loader, BF16).pack_linear(weight, None)
    assert packed(x).shape == (2, 3, 24)


def test_a_device_with_little_shared_memory_gets_small_tiles() -> None:
    for n, k in ((4096, 1024), (1024, 3072), (5120, 5120), (151_936, 1024)):
        plan = choose(n, k, 8, ADA)
        assert isinstance(plan, FewPlan)
        assert plan.shared_bytes(n, k) <= 79 << 10


@pytest.mark.parametrize(
    ("n", "k", "limit"),
    [(4096, 1024, 16), (1024, 3072, 16), (151_936, 1024, 8), (5120, 5120, 8), (34_816, 5120, 0)],
)
def test_each_weight_has_the_rows_at_which_the_library_was_slower(
    n: int, k: int, limit: int
) -> None:
    assert [rows for rows in (8, 16, 24) if choose(n, k, rows, A100)] == [
        rows for rows in (8, 16) if rows <= limit
    ]


@pytest.mark.parametrize("rows", [4, 24, 64, 96, 128])
@pytest.mark.parametrize("shape", [*MODEL_SHAPES, (8, 8), (576, 1536), (128, 2048), (49_152, 576)])
def test_batches_of_any_weight_have_a_form_that_fits(shape: tuple[int, int], rows: int) -> None:
    check_fits(batch_rule(*shape, rows, H200), shape, rows)


# Many more outputs than multiprocessors, and fewer inputs than a block should have.
@pytest.mark.parametrize("shape", [(15_300, 8), (32_000, 288), (151_936, 384), (262_144, 256)])
@pytest.mark.parametrize("num_sms", [16, 132])
def test_wide_weights_of_few_inputs_have_a_form_that_fits(
    shape: tuple[int, int], num_sms: int
) -> None:
    for rows in (9, 16, 64):
        check_fits(batch_rule(*shape, rows, replace(H200, num_sms=num_sms)), shape, rows)


@pytest.mark.parametrize("shape", MODEL_SHAPES)
def test_what_was_measured_fits_and_has_a_kernel(shape: tuple[int, int]) -> None:
    for rows in range(4, 129, 4):
        plan = choose(*shape, rows, H200)
        if isinstance(plan, BatchPlan):
            check_fits(plan, shape, rows)
        elif plan is not None:
            assert rows <= 16
            assert plan.shared_bytes(*shape) <= 128 << 10


def check_fits(plan: BatchPlan, shape: tuple[int, int], rows: int) -> None:
    """Check the memory, the rings and the kernel of a plan."""
    assert has_kernel(plan, rows)
    assert plan.shared_bytes(kernel_rows(rows)) <= 207 << 10
    assert min(plan.w_slots, plan.x_slots) >= min(2, plan.num_steps(shape[1]))


@pytest.mark.parametrize(
    ("n", "k", "limit"),
    [
        # As measured: q/k/v, o, gate and up, down, head of 0.6B, then of 14B.
        (4096, 1024, 64), (1024, 2048, 16), (6144, 1024, 64), (1024, 3072, 128),
        (151_936, 1024, 16), (7168, 5120, 32), (5120, 5120, 4), (34_816, 5120, 16),
        (5120, 17_408, 32), (151_936, 5120, 32),
        # By the rule: q/k/v, o, gate and up, down of 14B halved over two ranks, then of 32B.
        (3584, 5120, 32), (5120, 2560, 16), (17_408, 5120, 16), (5120, 8704, 32),
        (5120, 4096, 32), (25_600, 5120, 16), (5120, 12_800, 32),
        # Small ones, of few inputs and of many.
        (2048, 2048, 64), (576, 1536, 64), (512, 1536, 128),
    ],
)  # fmt: skip
def test_each_weight_has_the_rows_up_to_which_an_h200_was_quicker_than_the_library(
    n: int, k: int, limit: int
) -> None:
    served = [rows for rows in range(4, 129, 4) if choose(n, k, rows, H200)]
    assert served[-1] == limit


def test_the_kernels_of_batches_are_for_one_architecture() -> None:
    assert choose(1024, 3072, 64, DeviceSize(148, 227 << 10, "sm_100")) is None


@pytest.mark.parametrize("rows", [3, 4, 5, 8, 9, 17, 65, 97, 129])
def test_any_number_of_rows_is_served_whatever_serves_it(loader: Loader, rows: int) -> None:
    x, weight = make(rows, 264, dtype=BF16), make(64, 264, dtype=BF16, seed=1)
    packed = kernels_of(loader, BF16, H200, max_rows=128).pack_linear(weight, None)
    assert_near(packed(x), x.double() @ weight.double().t(), scale=1)
