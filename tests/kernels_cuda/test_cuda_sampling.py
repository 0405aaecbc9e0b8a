"""The batch sampler on the simulator: the tokens of the torch sampler, to the last one.

Both invert the same cumulative distribution at the same random number. Their sums differ in the
last bits, which moves a token with a chance of about one in a million per row.
"""

from __future__ import annotations

import pytest
import torch

from minisgl.errors import PluginError
from minisgl.ops.contract import SamplingInputs
from minisgl.ops.sampling import sample
from minisgl_kernels_cuda.sampling import MAX_VOCAB, Sampler
from minisgl_kernels_cuda.units import Loader
from tests.kernels_cuda.reference import BF16, F16, F32
from tests.kernels_cuda.sampling_case import logits_of, make_inputs


@pytest.fixture
def sampler(loader: Loader) -> Sampler:
    return Sampler(loader, BF16)


@pytest.mark.parametrize("vocab", [1, 7, 1024, 1025, 5003, 20_000])
@pytest.mark.parametrize(
    "filters",
    [
        {}, {"temperature": 0.0}, {"temperature": 0.3}, {"top_k": 1}, {"top_k": 3}, {"top_k": 50},
        {"top_p": 0.9}, {"top_p": 0.0}, {"top_p": 0.5, "top_k": 20}, {"min_p": 0.1},
        {"top_p": 0.8, "top_k": 40, "min_p": 0.3, "temperature": 0.6},
        {"top_k": 3000, "top_p": 0.99},
    ],
    ids=str,
)  # fmt: skip
def test_tokens_are_those_of_the_torch_sampler(
    sampler: Sampler, vocab: int, filters: dict[str, float]
) -> None:
    logits, inputs = logits_of(3, vocab, BF16), make_inputs(3, **filters)  # type: ignore[arg-type]  # values of both kinds
    before = logits.clone()
    tokens = sampler.sample(logits, inputs, False)
    assert tokens.dtype == torch.int32
    assert torch.equal(tokens, sample(logits, inputs, False))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("spread", [0.01, 0.5, 20.0])
def test_flat_and_peaked_rows_are_filtered_alike(sampler: Sampler, spread: float) -> None:
    # Flat rows have more candidates than the list holds.
    logits = logits_of(2, 12_000, F32, spread)
    for filters in ({"top_p": 0.7}, {"top_k": 100}, {"top_k": 5000, "top_p": 0.9}):
        inputs = make_inputs(2, **filters)
        assert torch.equal(sampler.sample(logits, inputs, False), sample(logits, inputs, False))


def test_rows_of_different_kinds_share_a_launch(loader: Loader) -> None:
    kinds = [
        make_inputs(1, temperature=0.0), make_inputs(1), make_inputs(1, top_k=5),
        make_inputs(1, top_p=0.4), make_inputs(1, min_p=0.2), make_inputs(1, temperature=9.0),
    ]  # fmt: skip
    inputs = SamplingInputs(*(torch.cat(values) for values in zip(*kinds, strict=True)))
    logits = logits_of(6, 3000, F16)
    tokens = Sampler(loader, F16).sample(logits, inputs, False)
    assert torch.equal(tokens, sample(logits, inputs, False))


def test_a_row_gives_the_same_token_in_any_batch(sampler: Sampler) -> None:
    logits, inputs = logits_of(4, 4001, BF16), make_inputs(4, top_p=0.95, top_k=500)
    whole = sampler.sample(logits, inputs, False)
    turned = sampler.sample(logits.flip(0), SamplingInputs(*(t.flip(0) for t in inputs)), False)
    alone = sampler.sample(logits[2:3], SamplingInputs(*(t[2:3] for t in inputs)), False)
    assert torch.equal(whole, turned.flip(0))
    assert torch.equal(whole[2:3], alone)


def test_draws_follow_the_weights(sampler: Sampler) -> None:
    num_rows = 400
    weights = torch.tensor([0.5, 0.25, 0.125, 0.125])
    logits = weights.log().expand(num_rows, -1)
    counts = sampler.sample(logits, make_inputs(num_rows), False).bincount(minlength=4)
    expected = weights * num_rows
    # Chi-square with 3 degrees of freedom: above 16.3 once in a thousand; the seeds are fixed.
    assert float(((counts - expected) ** 2 / expected).sum()) < 16.3


def test_equal_tokens_at_a_limit_are_all_kept(sampler: Sampler) -> None:
    logits = torch.zeros(64, 300)
    logits[:, 100:150] = 5.0
    tokens = sampler.sample(logits, make_inputs(64, top_k=2), False)
    assert int(tokens.min()) >= 100
    assert int(tokens.max()) < 150
    assert len(tokens.unique()) > 20


def test_greedy_takes_the_first_of_equal_logits(sampler: Sampler) -> None:
    logits = torch.zeros(2, 5000, dtype=BF16)
    logits[1, [4000, 1023, 77]] = 1.0
    for is_all_greedy in (False, True):
        tokens = sampler.sample(logits, make_inputs(2, temperature=0.0), is_all_greedy)
        assert tokens.tolist() == [0, 77]


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_a_broken_row_still_gives_a_token_of_the_vocabulary(sampler: Sampler, value: float) -> None:
    for filters in ({}, {"temperature": 0.0}, {"top_k": 4, "top_p": 0.5}):
        tokens = sampler.sample(torch.full((1, 1500), value), make_inputs(1, **filters), False)  # type: ignore[arg-type]  # values of both kinds
        assert 0 <= int(tokens[0]) < 1500


def test_tokens_of_minus_infinity_are_never_drawn(sampler: Sampler) -> None:
    logits = torch.full((50, 2100), float("-inf"), dtype=BF16)
    logits[:, [3, 2050]] = 1.0
    for filters in ({}, {"top_p": 0.99}, {"top_k": 100}):
        tokens = sampler.sample(logits, make_inputs(50, **filters), False)
        assert tokens.unique().tolist() == [3, 2050]


def test_rows_that_are_cut_from_wider_ones_are_sampled(sampler: Sampler) -> None:
    logits = logits_of(3, 2051, BF16)[:, 1:2050]
    inputs = make_inputs(3, top_k=30)
    assert torch.equal(sampler.sample(logits, inputs, False), sample(logits, inputs, False))


def test_a_vocabulary_that_is_too_large_is_refused(sampler: Sampler) -> None:
    with pytest.raises(PluginError, match=f"at most {MAX_VOCAB}"):
        sampler.sample(torch.empty(1, MAX_VOCAB + 1), make_inputs(1), False)
