"""Products of batches of rows, by warpgroups and clusters, on the simulator."""

from __future__ import annotations

import pytest
import torch

from minisgl_kernels_cuda.activation import build_activations
from minisgl_kernels_cuda.linear_plans import BatchPlan, has_kernel
from minisgl_kernels_cuda.units import Loader
from tests.kernels_cuda.planned_kernels import PlannedKernels, product
from tests.kernels_cuda.reference import BF16, F16, assert_near, make

PLANS = [
    BatchPlan(1, 1, 2, 2), BatchPlan(1, 1, 4, 2), BatchPlan(1, 2, 2, 3), BatchPlan(1, 4, 1, 1),
    BatchPlan(1, 8, 2, 2), BatchPlan(2, 1, 3, 2), BatchPlan(2, 2, 2, 3), BatchPlan(2, 8, 1, 1),
]  # fmt: skip


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize(
    ("rows", "n", "k"), [(9, 130, 488), (16, 64, 512), (33, 70, 488), (64, 256, 392)]
)
def test_batches_are_near_float64_in_every_form(
    loader: Loader, plan: BatchPlan, rows: int, n: int, k: int
) -> None:
    if not has_kernel(plan, rows):
        pytest.skip("no kernel is made for it")
    x, weight = make(rows, k, dtype=BF16), make(n, k, dtype=BF16, seed=1)
    bias = make(n, dtype=BF16, seed=2)
    packed = PlannedKernels(loader, BF16, plan).pack_linear(weight, bias)
    assert_near(packed(x), product(x, weight, bias), scale=k**0.5 / 16)


@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 31, 48, 64, 65, 95, 96, 97, 128])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_any_number_of_rows_is_served(loader: Loader, dtype: torch.dtype, rows: int) -> None:
    x, weight = make(rows, 264, dtype=dtype), make(37, 264, dtype=dtype, seed=1)
    packed = PlannedKernels(loader, dtype, BatchPlan(1, 2, 2, 2)).pack_linear(weight, None)
    assert_near(packed(x), product(x, weight), scale=1)


@pytest.mark.parametrize("num_steps", range(1, 9))
@pytest.mark.parametrize("slots", [(2, 2), (2, 4), (5, 3)])
def test_rings_of_any_length_carry_any_number_of_steps(
    loader: Loader, slots: tuple[int, int], num_steps: int
) -> None:
    k = 128 * num_steps - 8
    x, weight = make(12, k, dtype=BF16), make(64, k, dtype=BF16, seed=1)
    packed = PlannedKernels(loader, BF16, BatchPlan(1, 1, *slots)).pack_linear(weight, None)
    assert_near(packed(x), product(x, weight), scale=k**0.5 / 16)


@pytest.mark.parametrize("plan", [PLANS[2], PLANS[5], PLANS[6]], ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("n", [128, 72, 22])
def test_a_gated_batch_is_the_activation_of_the_product(
    loader: Loader, plan: BatchPlan, activation: str, n: int
) -> None:
    kernels = PlannedKernels(loader, BF16, plan)
    rows = 20 if plan.groups == 1 else 11
    x, weight = make(rows, 264, dtype=BF16), make(n, 264, dtype=BF16, seed=1) / 16
    bias = make(n, dtype=BF16, seed=2)
    out = kernels.pack_gated_linear(weight, bias, activation)(x)  # type: ignore[arg-type]  # one of the names
    act_and_mul = build_activations(loader, BF16)[f"{activation}_and_mul"]
    assert torch.equal(out, act_and_mul(kernels.pack_linear(weight, bias)(x)))


def test_rows_behind_the_batch_are_neither_read_nor_written(loader: Loader) -> None:
    storage = torch.full((40, 136), float("nan"), dtype=BF16)
    storage[:19] = make(19, 136, dtype=BF16)
    weight = make(64, 136, dtype=BF16, seed=1)
    packed = PlannedKernels(loader, BF16, BatchPlan(1, 2, 2, 2)).pack_linear(weight, None)
    assert_near(packed(storage[:19]), product(storage[:19], weight), scale=1)


def test_a_row_is_the_same_whatever_rows_are_beside_it(loader: Loader) -> None:
    x, weight = make(32, 520, dtype=BF16), make(48, 520, dtype=BF16, seed=1)
    packed = PlannedKernels(loader, BF16, BatchPlan(1, 4, 2, 2)).pack_linear(weight, None)
    assert torch.equal(packed(x)[20:], packed(x[20:].clone()))


def test_a_cut_of_wider_rows_is_copied_first(loader: Loader) -> None:
    x, weight = make(20, 272, dtype=BF16)[:, 8:], make(40, 264, dtype=BF16, seed=1)
    packed = PlannedKernels(loader, BF16, BatchPlan(1, 1, 2, 2)).pack_linear(weight, None)
    assert_near(packed(x), product(x, weight), scale=1)
