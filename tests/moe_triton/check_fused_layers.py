"""The kernels of `fused` against a loop over tokens in float64.

In the interpreter where there is no GPU: see ``test_interpreted.py``, which runs this file.
Tolerances are those of the conformance suite, see `minisgl.testing.reference.tolerance`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minisgl.testing.reference import assert_close, moe
from minisgl_moe_triton.backend import FusedMoEBackend
from minisgl_moe_triton.plan import Step, TileShape
from minisgl_moe_triton.settings import FusedSettings
from tests.moe_triton.moe_case import DEVICE, Layer, Sizes, small_tiles, tiled_backend


def slowly(*values: object) -> object:
    """A case that goes the way of others: the interpreter takes a second for each."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("num_tokens", "is_renormalized"),
    [
        (1, True), (2, True), (7, True), (64, True), (257, True),
        (1, False), slowly(2, False), slowly(7, False), (64, False), slowly(257, False),
    ],
)  # fmt: skip
def test_any_number_of_tokens(num_tokens: int, is_renormalized: bool) -> None:
    Layer(Sizes(is_renormalized=is_renormalized)).check(num_tokens)


@pytest.mark.parametrize("top_k", [1, *map(slowly, (2, 3, 4)), 5, *map(slowly, (6, 7)), 8])
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_any_number_of_experts_per_token(top_k: int, num_tokens: int) -> None:
    Layer(Sizes(top_k=top_k, hidden_size=32, intermediate_size=16)).check(num_tokens)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 20, slowly(70)])
def test_half_types(num_tokens: int, dtype: torch.dtype) -> None:
    Layer(Sizes(dtype=dtype)).check(num_tokens)


@pytest.mark.parametrize("sizes", [(33, 17), (16, 1), (50, 70)])
@pytest.mark.parametrize("num_tokens", [1, slowly(19), 65])
def test_odd_sizes(sizes: tuple[int, int], num_tokens: int) -> None:
    Layer(Sizes(5, 3, *sizes)).check(num_tokens)


@pytest.mark.parametrize("num_tokens", [1, slowly(5), 66])
def test_more_experts_than_slots(num_tokens: int) -> None:
    Layer(Sizes(60, 4, 32, 16)).check(num_tokens)


@pytest.mark.parametrize("num_tokens", [1, slowly(17), 66])
def test_all_tokens_on_the_same_experts(num_tokens: int) -> None:
    layer = Layer(Sizes())
    layer.check(num_tokens, layer.logits(1).expand(num_tokens, -1).contiguous())


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_experts_that_no_token_chose(num_tokens: int) -> None:
    layer = Layer(Sizes(num_experts=16))
    logits = layer.logits(num_tokens)
    logits[:, ::2] = -50
    layer.check(num_tokens, logits)


@pytest.mark.parametrize("group_m", [slowly(1), 2, slowly(4)])
@pytest.mark.parametrize("num_tokens", [20])
def test_many_tiles_in_each_direction(tmp_path: Path, num_tokens: int, group_m: int) -> None:
    sizes = Sizes()
    backend = tiled_backend(tmp_path, sizes, small_tiles(16, group_m))
    Layer(sizes, backend).check(num_tokens)


@pytest.mark.parametrize("num_tokens", [2, 70])
def test_blocks_in_halves(tmp_path: Path, num_tokens: int) -> None:
    sizes = Sizes()
    backend = tiled_backend(tmp_path, sizes, small_tiles(32, has_halves=True))
    Layer(sizes, backend).check(num_tokens)


@pytest.mark.parametrize("has_tma", [slowly(False), True])
def test_ways_to_load(tmp_path: Path, has_tma: bool) -> None:
    # 40 columns are no multiple of a tile: where gate ends, rows of up are loaded and not stored.
    for sizes in (Sizes(), Sizes(5, 3, 56, 24)):
        step = small_tiles(32, has_halves=True, has_tma=has_tma)
        Layer(sizes, tiled_backend(tmp_path, sizes, step)).check(70)


def test_one_token_in_many_tiles(tmp_path: Path) -> None:
    sizes = Sizes(top_k=3, hidden_size=50, intermediate_size=37)
    tile = TileShape(block_n=4, block_k=8)
    backend = tiled_backend(tmp_path, sizes, Step(1, 1, tile, tile), small_tiles())
    Layer(sizes, backend).check(1)


@pytest.mark.parametrize("num_tokens", [1, slowly(6), 66])
def test_of_equal_logits_the_first_experts_are_chosen(num_tokens: int) -> None:
    layer = Layer(Sizes())
    x = layer.randn(num_tokens, 48)
    tied = torch.zeros(num_tokens, 8, device=DEVICE)
    tied[:, 5] = 1.0
    broken = tied.clone()
    broken[:, 0] = 1e-6  # the same choice and, to float32 rounding, the same weights
    torch.testing.assert_close(layer.run(x, tied), layer.run(x, broken), rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [2, 66])
def test_a_token_with_nan_logits_spoils_no_other(num_tokens: int) -> None:
    layer = Layer(Sizes())
    x, logits = layer.randn(num_tokens, 48), layer.logits(num_tokens)
    expected = moe(x, logits, layer.experts)
    logits[0, 3] = float("nan")
    out = layer.run(x, logits)
    assert out[0].isnan().all()
    assert_close(out[1:], expected[1:], torch.float32, "other tokens are as ever")


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter's numpy
def test_one_token_with_nan_logits_gives_nan() -> None:
    layer = Layer(Sizes())
    logits = torch.full((1, 8), float("nan"), device=DEVICE)
    assert layer.run(layer.randn(1, 48), logits).isnan().all()


def test_more_tokens_than_the_workspace_holds_run_in_parts() -> None:
    sizes = Sizes()
    settings = FusedSettings(chunk_tokens=20)
    Layer(sizes, FusedMoEBackend(sizes.config(settings=settings))).check(47)


def test_no_tokens_give_no_rows() -> None:
    layer = Layer(Sizes())
    assert layer.run(layer.randn(0, 48), layer.randn(0, 8)).shape == (0, 48)


def test_rows_that_nothing_fills_are_not_read(tmp_path: Path) -> None:
    sizes = Sizes()
    layer = Layer(sizes, tiled_backend(tmp_path, sizes, small_tiles()))
    layer.run(layer.randn(24, 48) * float("nan"), layer.logits(24))  # leaves NaN in the workspace
    layer.check(5)


def test_a_token_gives_the_same_bits_wherever_it_stands() -> None:
    layer = Layer(Sizes())
    x, logits = layer.randn(70, 48), layer.logits(70)
    out = layer.run(x, logits)
    flipped = layer.run(x.flip(0), logits.flip(0))
    assert torch.equal(out, flipped.flip(0))
