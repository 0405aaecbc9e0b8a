from __future__ import annotations

import pytest
import torch

from minisgl.layers.base import LoadTarget
from minisgl.weights.loader import init_dummy_weights

EVERY = slice(None)


def fill(shape: tuple[int, ...], index: tuple[slice, ...], seed: int = 0) -> torch.Tensor:
    dest = torch.full(torch.empty(shape, device="meta")[index].shape, torch.nan)
    init_dummy_weights([("model.layers.0.w.weight", LoadTarget(dest, shape, index))], seed)
    return dest


def test_the_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    whole = (EVERY, EVERY)
    assert torch.equal(fill((8, 16), whole), fill((8, 16), whole))
    assert not torch.equal(fill((8, 16), whole), fill((8, 16), whole, seed=1))


@pytest.mark.parametrize(
    "index",
    [
        (slice(100, 200), EVERY),
        (EVERY, slice(640, 1280)),
        (slice(5, 9), slice(3, 70)),
        (slice(0, 0), EVERY),
    ],
)
def test_the_slice_of_a_rank_is_the_slice_of_the_whole(index: tuple[slice, ...]) -> None:
    shape = (300, 1280)  # more numbers than are drawn, so that the row of them repeats
    assert torch.equal(fill(shape, index), fill(shape, (EVERY, EVERY))[index])


def test_stacked_weights_are_sliced_alike() -> None:
    index = (slice(1, 3), slice(4, 8), slice(2, 9))
    assert torch.equal(fill((4, 16, 12), index), fill((4, 16, 12), (EVERY,) * 3)[index])


def test_a_vocabulary_beyond_the_period_is_filled() -> None:
    big = fill((70000, 3), (EVERY, EVERY))
    assert torch.isfinite(big).all()
    assert abs(big.std() - 0.02) < 0.001


def test_matrices_are_small_and_of_full_rank() -> None:
    w = fill((64, 128), (EVERY, EVERY))
    assert abs(w.mean()) < 0.001
    assert abs(w.std() - 0.02) < 0.002
    assert torch.linalg.matrix_rank(w) == 64


def test_norms_are_about_one_and_biases_about_zero() -> None:
    weight, bias = torch.empty(512), torch.empty(512)
    targets = {"norm.weight": LoadTarget(weight, (512,)), "q.bias": LoadTarget(bias, (512,))}
    init_dummy_weights(targets)
    assert abs(weight.mean() - 1) < 0.01
    assert abs(bias.mean()) < 0.01


def test_global_random_state_is_untouched() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    fill((8, 8), (EVERY, EVERY))
    assert torch.equal(torch.rand(4), expected)


def test_alternative_names_and_skipped_tensors_are_left_alone() -> None:
    dest = torch.zeros(2, 3)
    first = LoadTarget(dest[0], (3,))
    second = LoadTarget(dest[1], (3,))
    stacked = LoadTarget(dest, (2, 3), (EVERY, EVERY), True, ("e.0.bias", "e.1.bias"))
    only = [("e.0.bias", first), ("e.1.bias", second)]
    init_dummy_weights([*only, ("e.bias", stacked), ("head", LoadTarget(None))])
    found = dest.clone()
    init_dummy_weights(only)
    assert torch.equal(found, dest)


def test_what_is_raised_before_a_tensor_leaves_it_alone() -> None:
    dest = torch.zeros(3)

    def give_up() -> None:
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        init_dummy_weights([("x", LoadTarget(dest, (3,)))], on_tensor=give_up)
    assert not dest.any()
