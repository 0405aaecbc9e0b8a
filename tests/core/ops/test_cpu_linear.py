"""Linear layers on a CPU, in every form that the row count selects."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minisgl.ops.cpu_linear import TransposedLinear, UnpackedLinear, pack_linear

ROWS = [1, 2, 3, 4, 7, 12, 13, 16, 31, 48, 49, 64, 65, 130]
# (out, in): blocks of 64 or not, taller and wider than square, a vocabulary, one output.
SHAPES = [(192, 64), (100, 64), (64, 192), (2048, 64), (1, 33), (7, 1), (2200, 512), (16384, 8)]


def make_weight(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    gen = torch.Generator().manual_seed(shape[0])
    return torch.randn(shape, generator=gen).to(dtype)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_every_row_count_gives_the_product(shape: tuple[int, int], has_bias: bool) -> None:
    weight = make_weight(shape)
    bias = torch.randn(shape[0]) if has_bias else None
    linear = pack_linear(weight, bias)
    for num_rows in ROWS:
        x = torch.randn(num_rows, shape[1])
        out = linear(x)
        assert out.is_contiguous()
        # float32 sums of at most 512 products of order one.
        torch.testing.assert_close(out.double(), exact(x, weight, bias), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", [UnpackedLinear, TransposedLinear])
@pytest.mark.parametrize("lead", [(), (1,), (5,), (2, 3), (2, 40)])
def test_leading_dimensions_are_kept(
    form: type[UnpackedLinear | TransposedLinear], lead: tuple[int, ...]
) -> None:
    weight, x = make_weight((192, 64)), torch.randn(*lead, 64)
    out = form(weight, None)(x)
    assert out.shape == (*lead, 192)
    torch.testing.assert_close(out.double(), exact(x, weight, None), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("num_rows", [1, 5, 20, 100])
def test_rows_may_be_strided(num_rows: int) -> None:
    x = torch.randn(num_rows, 200)[:, 64:128]
    for shape in SHAPES[:2]:
        weight = make_weight(shape)
        out = pack_linear(weight, None)(x)
        torch.testing.assert_close(out.double(), exact(x, weight, None), rtol=1e-5, atol=1e-4)


def test_no_rows_give_no_rows() -> None:
    for shape in SHAPES:
        assert pack_linear(make_weight(shape))(torch.empty(0, shape[1])).shape == (0, shape[0])


@pytest.mark.parametrize("shape", [(192, 64), (2200, 512)])
def test_a_transposed_weight_does_not_need_the_original(shape: tuple[int, int]) -> None:
    weight = make_weight(shape)
    linear = pack_linear(weight)
    assert isinstance(linear, TransposedLinear)
    assert not linear.is_original_needed
    x = torch.randn(9, shape[1])
    expected = exact(x, weight, None)
    weight.zero_()
    # float32 sums of at most 512 products of order one.
    torch.testing.assert_close(linear(x).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(64, 192), (2048, 64), (2048, 1024)])
def test_tall_weights_vocabularies_and_wide_inputs_stay_as_they_are(
    shape: tuple[int, int],
) -> None:
    assert pack_linear(make_weight(shape)).is_original_needed


@pytest.mark.parametrize("num_rows", [1, 8, 20])
def test_other_dtypes_are_the_plain_product(num_rows: int) -> None:
    weight = make_weight((192, 64), torch.bfloat16)
    x = torch.randn(num_rows, 64).bfloat16()
    expected = torch.nn.functional.linear(x, weight)
    assert torch.equal(pack_linear(weight)(x), expected)


def test_the_size_is_that_of_weight_and_bias() -> None:
    for shape in SHAPES:
        assert pack_linear(make_weight(shape), torch.zeros(shape[0])).num_bytes == 4 * (
            shape[0] * shape[1] + shape[0]
        )
