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
from minisgl.ops.native_linear import (
    LinearForm,
    NativeLinear,
    fits_tiles,
    load_kernels,
    pack_gated_linear,
    pack_linear,
)

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason="needs a C++ compiler")

# (out, in): whole vectors and not, one output, one input, more inputs than are summed at once.
SHAPES = [(192, 64), (100, 65), (33, 16), (7, 1), (1, 33), (40, 2500), (95, 130)]
ROWS = [1, 2, 3, 6, 7, 13, 14, 15, 28, 29, 64, 97, 130]
ACTIVATIONS: dict[GatedActivation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def make_weight(num_outputs: int, num_inputs: int, terms: int = 2) -> Tensor:
    """Make a weight whose numbers are sums of so many bfloat16."""
    gen = torch.Generator().manual_seed(num_outputs)
    left = torch.randn(num_outputs, num_inputs, generator=gen).div_(num_inputs**0.5)
    weight = torch.zeros_like(left)
    for _ in range(terms):
        term = left.bfloat16().float()
        weight, left = weight + term, left - term
    return weight


def needs_unit(form: str) -> None:
    if form == "tiles" and load_kernels().tiles is None:
        pytest.skip("needs a CPU with AMX")


def exact(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()


def assert_close(out: Tensor, expected: Tensor) -> None:
    # float32 sums of order one: at most 1024 products in a chain.
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)


@pytest.fixture(params=["panels", "dots", "tiles"])
def form(request: pytest.FixtureRequest) -> LinearForm:
    """Each form that this machine has."""
    needs_unit(request.param)
    return request.param  # type: ignore[no-any-return]  # one of the params


@pytest.fixture(params=["panels", "tiles"])
def gated_form(request: pytest.FixtureRequest) -> LinearForm:
    """Each form that takes an activation."""
    needs_unit(request.param)
    return request.param  # type: ignore[no-any-return]  # one of the params


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Run with so many threads."""
    before, count = torch.get_num_threads(), int(request.param)
    torch.set_num_threads(count)
    yield count
    torch.set_num_threads(before)


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_row_count_gives_the_product(
    shape: tuple[int, int], has_bias: bool, form: LinearForm
) -> None:
    weight = make_weight(*shape)
    bias = torch.randn(shape[0]) if has_bias else None
    linear = NativeLinear(weight, bias, form)
    for num_rows in ROWS:
        x = torch.randn(num_rows, shape[1])
        assert_close(linear(x), exact(x, weight, bias))


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(48, 64), (17, 33), (5, 2500)])
def test_gates_are_activated_and_multiplied(
    shape: tuple[int, int], has_bias: bool, name: GatedActivation, gated_form: LinearForm
) -> None:
    num_outputs, num_inputs = shape
    weight = make_weight(2 * num_outputs, num_inputs)
    bias = torch.randn(2 * num_outputs) if has_bias else None
    linear = NativeLinear(weight, bias, gated_form, name)
    for num_rows in ROWS:
        x = torch.randn(num_rows, num_inputs)
        gate, up = exact(x, weight, bias).chunk(2, dim=-1)
        assert_close(linear(x), ACTIVATIONS[name](gate) * up)


@pytest.mark.parametrize("shape", [(192, 64), (100, 65), (40, 2500)])
def test_a_row_has_the_same_bits_in_any_company(
    shape: tuple[int, int], form: LinearForm, num_threads: int
) -> None:
    linear = NativeLinear(make_weight(*shape), torch.randn(shape[0]), form)
    x = torch.randn(130, shape[1])
    alone = torch.cat([linear(row[None]) for row in x])
    for num_rows in ROWS:
        assert torch.equal(linear(x[:num_rows]), alone[:num_rows])
    torch.set_num_threads(3 - num_threads)
    assert torch.equal(linear(x), alone)


def test_a_gated_row_has_the_same_bits_in_any_company(gated_form: LinearForm) -> None:
    linear = NativeLinear(make_weight(200, 65), None, gated_form, "silu")
    x = torch.randn(130, 65)
    alone = torch.cat([linear(row[None]) for row in x])
    assert torch.equal(linear(x), alone)


@pytest.mark.parametrize("num_rows", [301, 700])
def test_more_rows_than_stay_in_the_cache_give_the_product(num_rows: int, form: LinearForm) -> None:
    weight = make_weight(70, 3000)
    linear, x = NativeLinear(weight, None, form), torch.randn(num_rows, 3000)
    assert_close(linear(x), exact(x, weight))
    assert torch.equal(linear(x[:2]), linear(x)[:2])


@pytest.mark.parametrize("num_rows", [1, 5, 20, 100])
def test_rows_may_be_strided(num_rows: int, form: LinearForm) -> None:
    weight = make_weight(100, 64)
    linear, wide = NativeLinear(weight, None, form), torch.randn(num_rows, 200)
    assert_close(linear(wide[:, 64:128]), exact(wide[:, 64:128], weight))
    across = torch.randn(64, num_rows).T
    assert_close(linear(across), exact(across, weight))
    assert_close(linear(wide[:1, :64].expand(7, 64)), exact(wide[:1, :64].expand(7, 64), weight))


@pytest.mark.parametrize("lead", [(), (1,), (5,), (2, 3), (0,), (2, 0)])
def test_leading_dimensions_are_kept(lead: tuple[int, ...], form: LinearForm) -> None:
    weight, x = make_weight(100, 64), torch.randn(*lead, 64)
    out = NativeLinear(weight, None, form)(x)
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


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(value: float, form: LinearForm) -> None:
    linear, x = NativeLinear(make_weight(100, 64), None, form), torch.randn(20, 64)
    expected = linear(x)
    x[3] = value
    out = linear(x)
    assert not bool(out[3].isfinite().any())
    kept = [row for row in range(20) if row != 3]
    assert torch.equal(out[kept], expected[kept])


def test_every_pattern_of_a_number_that_is_none_gives_none(form: LinearForm) -> None:
    patterns = torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7F800001, -1], dtype=torch.int32)
    linear, x = NativeLinear(make_weight(40, 64), None, form), torch.zeros(4, 64)
    x[:, 5] = patterns.view(torch.float32)
    assert bool(linear(x).isnan().all())


@pytest.mark.parametrize(("terms", "room"), [(1, 2), (2, 4)])
def test_tiles_keep_each_term_of_a_weight_in_two_bytes(terms: int, room: int) -> None:
    needs_unit("tiles")
    weight = make_weight(192, 64, terms)
    linear, x = NativeLinear(weight, None, "tiles"), torch.randn(9, 64)
    assert linear.num_bytes == room * weight.numel()
    assert_close(linear(x), exact(x, weight))


def test_tiles_are_as_exact_as_float32() -> None:
    needs_unit("tiles")
    weight, x = make_weight(256, 512), torch.randn(64, 512)
    error = (NativeLinear(weight, None, "tiles")(x) - exact(x, weight)).abs().max()
    assert float(error) < 2 * float((F.linear(x, weight) - exact(x, weight)).abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_was_stored_in_16_bits_fits_tiles(dtype: torch.dtype) -> None:
    needs_unit("tiles")
    assert fits_tiles(torch.randn(50, 70).to(dtype).float())


@pytest.mark.parametrize("place", [0, 31, 33, 3499])
@pytest.mark.parametrize("value", [1 + 2**-10 + 2**-20, float("nan"), float("inf")])
def test_one_number_that_needs_more_keeps_a_weight_out_of_tiles(value: float, place: int) -> None:
    weight = torch.ones(50, 70)
    weight.view(-1)[place] = value
    assert not fits_tiles(weight)
    if load_kernels().tiles is not None:
        with pytest.raises(ValueError, match="form tiles: .*is a sum of 2 bfloat16"):
            NativeLinear(weight, None, "tiles")


def test_the_best_layout_is_that_of_the_numbers() -> None:
    needs_unit("tiles")
    few, many = make_weight(64, 64), torch.randn(64, 64)
    x = torch.randn(5, 64)
    assert torch.equal(pack_linear(few)(x), NativeLinear(few, None, "tiles")(x))
    assert torch.equal(pack_linear(many)(x), NativeLinear(many, None, "panels")(x))
    gated = NativeLinear(few, None, "tiles", "silu")(x)
    assert torch.equal(pack_gated_linear(few, None, "silu")(x), gated)
