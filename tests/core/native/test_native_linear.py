"""Products by the native kernels against float64, over odd shapes and row counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.native.library import unavailable_reason
from minisgl.ops.contract import GatedActivation
from minisgl.ops.native_linear import NativeLinear, pack_gated_linear, pack_linear

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason="needs a C++ compiler")

# (out, in): whole vectors and not, one output, one input, more inputs than are summed at once.
SHAPES = [(192, 64), (100, 65), (33, 16), (7, 1), (1, 33), (40, 2500), (95, 130)]
ROWS = [1, 2, 3, 6, 7, 13, 14, 15, 28, 29, 64, 97, 130]
ACTIVATIONS: dict[GatedActivation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def make_weight(num_outputs: int, num_inputs: int) -> Tensor:
    gen = torch.Generator().manual_seed(num_outputs)
    weight = torch.randn(num_outputs, num_inputs, generator=gen)
    return weight.div_(num_inputs**0.5)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()


def assert_close(out: Tensor, expected: Tensor) -> None:
    # float32 sums of order one: at most 1024 products in a chain.
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Run with so many threads."""
    before, count = torch.get_num_threads(), int(request.param)
    torch.set_num_threads(count)
    yield count
    torch.set_num_threads(before)


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_row_count_gives_the_product(
    shape: tuple[int, int], has_bias: bool, is_packed: bool
) -> None:
    weight = make_weight(*shape)
    bias = torch.randn(shape[0]) if has_bias else None
    linear = NativeLinear(weight, bias, is_packed)
    for num_rows in ROWS:
        x = torch.randn(num_rows, shape[1])
        assert_close(linear(x), exact(x, weight, bias))


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(48, 64), (17, 33), (5, 2500)])
def test_gates_are_activated_and_multiplied(
    shape: tuple[int, int], has_bias: bool, name: GatedActivation
) -> None:
    num_outputs, num_inputs = shape
    weight = make_weight(2 * num_outputs, num_inputs)
    bias = torch.randn(2 * num_outputs) if has_bias else None
    linear = pack_gated_linear(weight, bias, name)
    for num_rows in ROWS:
        x = torch.randn(num_rows, num_inputs)
        gate, up = exact(x, weight, bias).chunk(2, dim=-1)
        assert_close(linear(x), ACTIVATIONS[name](gate) * up)


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("shape", [(192, 64), (100, 65), (40, 2500)])
def test_a_row_has_the_same_bits_in_any_company(
    shape: tuple[int, int], is_packed: bool, num_threads: int
) -> None:
    linear = NativeLinear(make_weight(*shape), torch.randn(shape[0]), is_packed)
    x = torch.randn(130, shape[1])
    alone = torch.cat([linear(row[None]) for row in x])
    for num_rows in ROWS:
        assert torch.equal(linear(x[:num_rows]), alone[:num_rows])
    torch.set_num_threads(3 - num_threads)
    assert torch.equal(linear(x), alone)


def test_a_gated_row_has_the_same_bits_in_any_company() -> None:
    linear = pack_gated_linear(make_weight(200, 65), None, "silu")
    x = torch.randn(130, 65)
    alone = torch.cat([linear(row[None]) for row in x])
    assert torch.equal(linear(x), alone)


def test_more_rows_than_stay_in_the_cache_give_the_product() -> None:
    weight = make_weight(70, 3000)
    linear, x = pack_linear(weight), torch.randn(301, 3000)
    assert_close(linear(x), exact(x, weight))


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("num_rows", [1, 5, 20, 100])
def test_rows_may_be_strided(num_rows: int, is_packed: bool) -> None:
    weight = make_weight(100, 64)
    linear, wide = NativeLinear(weight, None, is_packed), torch.randn(num_rows, 200)
    assert_close(linear(wide[:, 64:128]), exact(wide[:, 64:128], weight))
    across = torch.randn(64, num_rows).T
    assert_close(linear(across), exact(across, weight))
    assert_close(linear(wide[:1, :64].expand(7, 64)), exact(wide[:1, :64].expand(7, 64), weight))


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("lead", [(), (1,), (5,), (2, 3), (0,), (2, 0)])
def test_leading_dimensions_are_kept(lead: tuple[int, ...], is_packed: bool) -> None:
    weight, x = make_weight(100, 64), torch.randn(*lead, 64)
    out = NativeLinear(weight, None, is_packed)(x)
    assert out.shape == (*lead, 100)
    assert_close(out, exact(x, weight))


def test_a_packed_weight_does_not_need_the_original() -> None:
    weight = make_weight(192, 64)
    linear, x = pack_linear(weight), torch.randn(9, 64)
    expected = exact(x, weight)
    weight.fill_(float("nan"))
    assert not linear.is_original_needed
    assert_close(linear(x), expected)


def test_a_vocabulary_stays_as_it_is() -> None:
    weight = make_weight(2048, 64)
    linear = pack_linear(weight)
    assert linear.is_original_needed
    assert linear.num_bytes == weight.nbytes


def test_a_weight_may_be_strided() -> None:
    weight = make_weight(64, 192).T
    x = torch.randn(4, 64)
    assert_close(pack_linear(weight)(x), exact(x, weight))


def test_a_packed_weight_takes_the_room_of_the_original() -> None:
    weight = make_weight(192, 64)
    assert pack_linear(weight, torch.zeros(192)).num_bytes == weight.nbytes + 4 * 192


def test_what_is_not_finite_stays_in_its_row() -> None:
    weight, x = make_weight(100, 64), torch.randn(20, 64)
    expected = pack_linear(weight)(x)
    x[3] = float("nan")
    out = pack_linear(weight)(x)
    assert bool(out[3].isnan().all())
    kept = [row for row in range(20) if row != 3]
    assert torch.equal(out[kept], expected[kept])
