"""Products of many rows, whose warps have roles of their own, on the simulator."""

from __future__ import annotations

import pytest
import torch

from minisgl.ops.contract import GatedActivation
from minisgl_kernels_cuda.activation import build_activations
from minisgl_kernels_cuda.linear_table import many_rows
from minisgl_kernels_cuda.units import DeviceSize, Loader
from tests.kernels_cuda.planned_kernels import LargeKernels, product
from tests.kernels_cuda.reference import BF16, F16, assert_near, make

ONE_CLUSTER = DeviceSize(2, 227 << 10, "sm_90a")


@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [
        # Rows and outputs around the ends of a tile; inputs of one step, of some and of a part.
        (1, 8, 8), (127, 256, 64), (128, 248, 72), (129, 264, 128), (257, 40, 200), (130, 520, 56),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_products_of_any_size_are_near_float64(
    loader: Loader, dtype: torch.dtype, rows: int, n: int, k: int
) -> None:
    x, weight = make(rows, k, dtype=dtype), make(n, k, dtype=dtype, seed=1)
    bias = make(n, dtype=dtype, seed=2) if rows % 2 else None
    packed = LargeKernels(loader, dtype).pack_linear(weight, bias)
    assert_near(packed(x), product(x, weight, bias), scale=max(1, k**0.5 / 16))


@pytest.mark.parametrize("num_steps", range(1, 10))
def test_a_cluster_takes_tiles_of_any_number_of_steps_one_after_another(
    loader: Loader, num_steps: int
) -> None:
    # More tiles than one, so that the ring goes on over their ends, at each of its places.
    rows, n, k = 270, 264 if num_steps < 5 else 24, 64 * num_steps - 8
    x, weight = make(rows, k, dtype=BF16), make(n, k, dtype=BF16, seed=1)
    packed = LargeKernels(loader, BF16, ONE_CLUSTER).pack_linear(weight, None)
    assert_near(packed(x), product(x, weight), scale=k**0.5 / 16)


def test_many_pairs_of_rows_are_taken_by_few_clusters(loader: Loader) -> None:
    # More than go through the outputs together, and a rest.
    x, weight = make(2600, 64, dtype=BF16), make(272, 64, dtype=BF16, seed=1)
    device = DeviceSize(7, 227 << 10, "sm_90a")
    packed = LargeKernels(loader, BF16, device).pack_linear(weight, None)
    assert_near(packed(x), product(x, weight), scale=1)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "n"), [(1, 16), (127, 256), (260, 272), (129, 496)])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_a_gated_product_is_the_activation_of_the_product(
    loader: Loader, dtype: torch.dtype, activation: GatedActivation, rows: int, n: int
) -> None:
    kernels, k = LargeKernels(loader, dtype, ONE_CLUSTER), 200
    x, weight = make(rows, k, dtype=dtype), make(n, k, dtype=dtype, seed=1) / 16
    bias = make(n, dtype=dtype, seed=2) if rows % 2 else None
    out = kernels.pack_gated_linear(weight, bias, activation)(x)
    act_and_mul = build_activations(loader, dtype)[f"{activation}_and_mul"]
    assert torch.equal(out, act_and_mul(kernels.pack_linear(weight, bias)(x)))


def test_nothing_beside_the_tensors_is_read_or_counts(loader: Loader) -> None:
    storage = torch.full((200, 136), float("nan"), dtype=BF16)
    storage[:130] = make(130, 136, dtype=BF16)
    weights = torch.full((400, 136), float("nan"), dtype=BF16)
    weights[:264] = make(264, 136, dtype=BF16, seed=1)
    bias = torch.full((400,), float("nan"), dtype=BF16)
    bias[:264] = make(264, dtype=BF16, seed=2)
    packed = LargeKernels(loader, BF16).pack_linear(weights[:264], bias[:264])
    out = packed(storage[:130])
    assert_near(out, product(storage[:130], weights[:264], bias[:264]), scale=1)


def test_a_row_is_the_same_whatever_rows_are_beside_it(loader: Loader) -> None:
    x, weight = make(300, 200, dtype=BF16), make(48, 200, dtype=BF16, seed=1)
    packed = LargeKernels(loader, BF16).pack_linear(weight, None)
    assert torch.equal(packed(x)[280:], packed(x[280:].clone()))


@pytest.mark.parametrize("case", ["odd outputs", "an odd half", "odd inputs", "odd address"])
def test_the_library_takes_what_the_engine_cannot_copy(loader: Loader, case: str) -> None:
    n, k = 20 if case == "odd outputs" else 24, 63 if case == "odd inputs" else 64
    x, weight = make(5, k, dtype=BF16), make(n + 1, k, dtype=BF16, seed=1)[1:]
    if case == "odd address":
        weight = torch.empty(n * k + 1, dtype=BF16)[1:].view(n, k).copy_(weight)
    kernels = LargeKernels(loader, BF16)
    kernels.may_refuse = True
    expected = torch.nn.functional.linear(x, weight)
    if case == "an odd half":
        silu_and_mul = build_activations(loader, BF16)["silu_and_mul"]
        assert torch.equal(
            kernels.pack_gated_linear(weight, None, "silu")(x), silu_and_mul(expected)
        )
    else:
        assert torch.equal(kernels.pack_linear(weight, None)(x), expected)


@pytest.mark.parametrize(
    ("n", "k", "is_gated", "rows"),
    [
        # 14B: q/k/v, o, gate and up, down; then 0.6B's gate and up, and q/k/v.
        (7168, 5120, False, 4096), (5120, 5120, False, 4096), (34_816, 5120, True, 2048),
        (5120, 17_408, False, 4096), (6144, 1024, True, 2048), (4096, 1024, False, None),
    ],
)  # fmt: skip
def test_large_weights_take_many_rows_from_as_many_on_as_were_measured(
    n: int, k: int, is_gated: bool, rows: int | None
) -> None:
    taken = many_rows(n, k, is_gated)
    assert (1 << 20 in taken) == (rows is not None)
    if rows is not None:
        assert rows in taken
        assert rows - 1 not in taken


def test_other_architectures_leave_many_rows_to_the_library(loader: Loader) -> None:
    x, weight = make(4, 64, dtype=BF16), make(24, 64, dtype=BF16, seed=1)
    kernels = LargeKernels(loader, BF16, DeviceSize(148, 227 << 10, "sm_100"))
    kernels.may_refuse = True
    packed = kernels.pack_linear(weight, None)
    assert torch.equal(packed(x), torch.nn.functional.linear(x, weight))
