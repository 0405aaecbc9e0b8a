"""Gated products of large batches, on the simulator."""

from __future__ import annotations

import pytest
import torch

from minisgl.ops.contract import GatedActivation
from minisgl_kernels_cuda.activation import build_activations
from minisgl_kernels_cuda.linear import LargeProduct, Run, Weight
from minisgl_kernels_cuda.linear_table import wide_rows
from minisgl_kernels_cuda.linear_wide import evenness
from minisgl_kernels_cuda.units import DeviceSize, Loader
from tests.kernels_cuda.planned_kernels import H200, LargeKernels
from tests.kernels_cuda.reference import BF16, F16, assert_near, make

ONE_CLUSTER = DeviceSize(2, 227 << 10, "sm_90a")


def assert_right(
    loader: Loader, rows: int, n: int, k: int, *, dtype: torch.dtype = BF16,
    device: DeviceSize = H200, has_bias: bool = False,
) -> None:  # fmt: skip
    """Compare with the activation of the product, rounded where the library rounds."""
    x, weight = make(rows, k, dtype=dtype), make(n, k, dtype=dtype, seed=1) / 16
    bias = make(n, dtype=dtype, seed=2) if has_bias else None
    packed = LargeKernels(loader, dtype, device, is_wide=True)
    out = packed.pack_gated_linear(weight, bias, "silu")(x)
    sums = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    silu_and_mul = build_activations(loader, dtype)["silu_and_mul"]
    assert_near(out, silu_and_mul(sums.to(dtype)).double(), scale=max(1, k**0.5 / 16))


@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [
        # Rows and gates around the ends of a warpgroup, of a tile and of a pair; inputs of one
        # step, of some and of a part.
        (1, 16, 8), (64, 144, 64), (65, 160, 200), (129, 288, 136), (192, 304, 64), (191, 48, 328),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_products_of_any_size_are_the_activation_of_the_sums(
    loader: Loader, dtype: torch.dtype, rows: int, n: int, k: int
) -> None:
    assert_right(loader, rows, n, k, dtype=dtype, has_bias=rows % 2 == 1)


@pytest.mark.parametrize("rows", [64, 150])
@pytest.mark.parametrize("num_steps", range(1, 9))
def test_a_cluster_takes_tiles_of_any_number_of_steps_one_after_another(
    loader: Loader, rows: int, num_steps: int
) -> None:
    # Three pairs of tiles, so that the ring goes on over their ends, at each of its places.
    assert_right(loader, rows, 720, 64 * num_steps - 8, device=ONE_CLUSTER)


def test_nothing_beside_the_tensors_is_read_or_counts(loader: Loader) -> None:
    nan = float("nan")
    rows, n, k = 130, 304, 136
    storage, weights = torch.full((300, k), nan, dtype=BF16), torch.full((500, k), nan, dtype=BF16)
    storage[:rows], weights[:n] = make(rows, k, dtype=BF16), make(n, k, dtype=BF16, seed=1) / 16
    packed = LargeKernels(loader, BF16, is_wide=True)
    out = packed.pack_gated_linear(weights[:n], None, "silu")(storage[:rows])
    own = packed.pack_gated_linear(weights[:n].clone(), None, "silu")(storage[:rows].clone())
    assert torch.equal(out, own)
    assert out.isfinite().all()


def test_a_row_is_the_same_whatever_rows_are_beside_it(loader: Loader) -> None:
    x, weight = make(192, 200, dtype=BF16), make(304, 200, dtype=BF16, seed=1)
    packed = LargeKernels(loader, BF16, is_wide=True).pack_gated_linear(weight, None, "silu")
    expected = packed(x)
    for rows in (1, 64, 65, 129):
        assert torch.equal(packed(x[:rows].clone()), expected[:rows])


@pytest.mark.parametrize(
    ("n", "k", "part", "is_taken"),
    [
        (34_816, 5120, 121 / 132, True),  # 14B, and the same over two ranks
        (17_408, 5120, 61 / 66, True),
        (51_200, 5120, 178 / 198, True),  # 32B
        (24_576, 4096, 86 / 132, False),  # 8B: a third of the device would have nothing to do
        (6144, 1024, 22 / 66, False),  # 0.6B
        (19_000, 512, 1.0, False),  # is read sooner than a ring is filled
    ],
)
def test_wide_weights_take_large_batches_where_tiles_come_out_even(
    n: int, k: int, part: float, is_taken: bool
) -> None:
    rows = wide_rows(n, k, H200)
    assert [num in rows for num in (159, 160, 192, 193)] == [False, is_taken, is_taken, False]
    assert evenness(n, H200.num_sms) == pytest.approx(part)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_other_activations_are_left_to_the_library(
    loader: Loader, activation: GatedActivation
) -> None:
    kernels = LargeKernels(loader, BF16, is_wide=True)
    kernels.may_refuse = True
    x, weight = make(160, 64, dtype=BF16), make(304, 64, dtype=BF16, seed=1)
    act_and_mul = build_activations(loader, BF16)[f"{activation}_and_mul"]
    expected = act_and_mul(torch.nn.functional.linear(x, weight))
    assert torch.equal(kernels.pack_gated_linear(weight, None, activation)(x), expected)


class Recorder(LargeKernels):
    """Has both kernels of large products, each for rows of its own, and says which ran."""

    def large(self, of: Weight) -> list[LargeProduct]:
        def run_of(name: str) -> Run:
            return lambda out, x, num_rows: self.ran.append(name)

        self.ran: list[str] = []
        return [
            LargeProduct(range(3, 5), run_of("wide")),
            LargeProduct(range(7, 99), run_of("many")),
        ]


def test_the_number_of_rows_chooses_the_product(loader: Loader) -> None:
    kernels = Recorder(loader, BF16)
    packed = kernels.pack_gated_linear(make(16, 8, dtype=BF16), None, "silu")
    ran = []
    for rows in (2, 3, 4, 5, 6, 7, 98, 99):
        kernels.ran.clear()
        packed(make(rows, 8, dtype=BF16))
        ran.append(kernels.ran[0] if kernels.ran else "library")
    assert ran == ["library", "wide", "wide", "library", "library", "many", "many", "library"]
