from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.ops.contract import SamplingHints, SamplingInputs
from minisgl.ops.sampling import sample, uniform

VOCAB = 12


def make_inputs(
    num_rows: int,
    temperature: float = 1.0,
    top_k: int = VOCAB,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
) -> SamplingInputs:
    """Rows with the same parameters at positions 0, 1, 2, ..."""
    return SamplingInputs(
        torch.full((num_rows,), temperature),
        torch.full((num_rows,), top_k, dtype=torch.int32),
        torch.full((num_rows,), top_p),
        torch.full((num_rows,), min_p),
        torch.full((num_rows,), seed, dtype=torch.int64),
        torch.arange(num_rows, dtype=torch.int32),
    )


def stack(*parts: SamplingInputs) -> SamplingInputs:
    return SamplingInputs(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def take(inputs: SamplingInputs, rows: torch.Tensor) -> SamplingInputs:
    return SamplingInputs(*(tensor[rows] for tensor in inputs))


def random_logits(num_rows: int, vocab_size: int = VOCAB, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(num_rows, vocab_size, generator=generator)


def draw(logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    return sample(logits.clone(), inputs, False)


def frequencies(logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    """Return how often each token of one distribution is drawn."""
    tokens = draw(logits.expand(len(inputs.seeds), -1), inputs)
    return torch.bincount(tokens, minlength=logits.shape[-1]) / len(tokens)


def mixed_inputs() -> SamplingInputs:
    """Rows of every kind, in a row-by-row mix."""
    return stack(
        make_inputs(3, temperature=0.0),
        make_inputs(3, seed=1),
        make_inputs(3, top_k=4, seed=2),
        make_inputs(3, top_p=0.7, seed=3),
        make_inputs(3, min_p=0.2, seed=4),
        make_inputs(3, temperature=0.6, top_k=5, top_p=0.8, min_p=0.1, seed=5),
    )


def test_greedy_rows_take_the_likeliest_token() -> None:
    logits = random_logits(9)
    expected = logits.argmax(dim=-1).to(torch.int32)
    inputs = make_inputs(9, temperature=0.0)
    assert torch.equal(sample(logits, inputs, True), expected)
    assert torch.equal(draw(logits, inputs), expected)


def test_frequencies_follow_the_probabilities() -> None:
    logits = random_logits(1)
    observed = frequencies(logits, make_inputs(40_000, temperature=0.8))
    expected = (logits[0] / 0.8).softmax(dim=-1)
    # Five standard deviations of a frequency among 40000 draws.
    bound = 5 * (expected * (1 - expected) / 40_000).sqrt()
    assert ((observed - expected).abs() < bound).all()


def test_top_k_keeps_the_k_likeliest() -> None:
    logits = random_logits(1)
    observed = frequencies(logits, make_inputs(5000, top_k=3))
    assert set(observed.nonzero().flatten().tolist()) == set(logits[0].topk(3).indices.tolist())


@pytest.mark.parametrize(
    ("top_p", "num_kept"), [(0.39, 1), (0.4001, 2), (0.7, 2), (0.71, 3), (0.95, 4), (1.0, 4)]
)
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, num_kept: int) -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    observed = frequencies(logits, make_inputs(5000, top_k=4, top_p=top_p))
    assert observed.count_nonzero() == num_kept


def test_top_p_counts_what_top_k_left() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    # Of 0.4, 0.3 the first has 57 percent.
    assert frequencies(logits, make_inputs(2000, top_k=2, top_p=0.57)).count_nonzero() == 1
    assert frequencies(logits, make_inputs(2000, top_k=2, top_p=0.58)).count_nonzero() == 2


@pytest.mark.parametrize(("min_p", "num_kept"), [(0.0, 4), (0.24, 4), (0.26, 3), (0.8, 1)])
def test_min_p_is_a_share_of_the_likeliest(min_p: float, num_kept: int) -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    observed = frequencies(logits, make_inputs(5000, top_k=4, min_p=min_p))
    assert observed.count_nonzero() == num_kept


def test_temperature_applies_before_the_filters() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    # At temperature 0.1 the likeliest of the four has 95 percent.
    assert frequencies(logits, make_inputs(2000, 0.1, top_k=4, top_p=0.9)).count_nonzero() == 1


def test_impossible_tokens_are_never_drawn() -> None:
    logits = random_logits(1)
    logits[0, [0, 5, VOCAB - 1]] = float("-inf")
    observed = frequencies(logits, make_inputs(20_000, temperature=5.0))
    assert observed[[0, 5, VOCAB - 1]].tolist() == [0, 0, 0]


def test_tied_tokens_at_a_limit_are_all_kept() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 1.0]])
    assert frequencies(logits, make_inputs(5000, top_k=2)).count_nonzero() == 4


def test_one_kept_token_is_always_drawn() -> None:
    logits = random_logits(50)
    for options in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        inputs = make_inputs(50)._replace(
            **{
                name: torch.full_like(getattr(make_inputs(50), name), v)
                for name, v in options.items()
            }
        )
        assert torch.equal(draw(logits, inputs), logits.argmax(dim=-1).to(torch.int32))


@given(order=st.permutations(range(18)), size=st.integers(1, 18))
@settings(max_examples=60, deadline=None)
def test_a_row_does_not_depend_on_its_place_or_company(order: list[int], size: int) -> None:
    logits, inputs = random_logits(18), mixed_inputs()
    everyone = draw(logits, inputs)
    rows = torch.tensor(order[:size])
    assert torch.equal(draw(logits[rows], take(inputs, rows)), everyone[rows])


@pytest.mark.parametrize(
    ("inputs", "hints"),
    [
        (make_inputs(64, seed=7), SamplingHints(0, False)),
        (make_inputs(64, top_k=5, seed=7), SamplingHints(5, False)),
        (make_inputs(64, top_k=5, top_p=0.8, seed=7), SamplingHints(5, False)),
        (make_inputs(64, top_p=0.8, seed=7), SamplingHints(VOCAB, False)),
        (make_inputs(64, min_p=0.3, seed=7), SamplingHints(0, True)),
        (
            stack(make_inputs(32, seed=7), make_inputs(32, top_k=3, seed=8)),
            SamplingHints(3, False),
        ),
    ],
    ids=["plain", "top-k", "top-k and top-p", "top-p", "min-p", "some top-k"],
)
def test_hints_change_no_result(inputs: SamplingInputs, hints: SamplingHints) -> None:
    logits = random_logits(64)
    assert torch.equal(sample(logits.clone(), inputs, False, hints), draw(logits, inputs))


@pytest.mark.parametrize("width", [300, 1000])
def test_wide_vocabularies_are_filtered_alike_by_sorting_and_by_selecting(width: int) -> None:
    logits = random_logits(20, vocab_size=1000)
    inputs = make_inputs(20, top_k=200, top_p=0.9)
    selected = sample(logits.clone(), inputs, False, SamplingHints(200, False))
    assert torch.equal(sample(logits, inputs, False, SamplingHints(width, False)), selected)


def test_no_global_generator_is_touched() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first = draw(random_logits(20), make_inputs(20))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(4)
    assert torch.equal(draw(random_logits(20), make_inputs(20)), first)


def test_seed_and_position_both_change_the_draw() -> None:
    logits = torch.zeros(1, VOCAB)  # all equal, so that the draw alone decides
    rows = logits.expand(200, -1)
    first, second = (draw(rows, make_inputs(200, seed=seed)) for seed in (1, 2))
    assert first.unique().numel() == VOCAB
    assert (first == second).float().mean() < 0.2  # by chance 1 in 12


def test_uniform_numbers_are_uniform_over_seeds_and_over_positions() -> None:
    count = torch.arange(20_000)
    for drawn in (
        uniform(count, torch.zeros_like(count)),
        uniform(torch.zeros_like(count), count),
        uniform(-count * 2**40, count * 0 + 17),
    ):
        assert drawn.min() >= 0
        assert drawn.max() < 1
        histogram = drawn.mul(10).to(torch.int64).bincount(minlength=10)
        # Five standard deviations of a tenth of 20000.
        assert ((histogram - 2000).abs() < 5 * (20_000 * 0.1 * 0.9) ** 0.5).all()


def test_uniform_is_splitmix64() -> None:
    mask = 2**64 - 1

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    # The generator's published first output for seed 0.
    assert mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF
    seed, position = -123456789, 41
    state = (mix((seed + 0x9E3779B97F4A7C15) & mask) + 42 * 0x9E3779B97F4A7C15) & mask
    drawn = uniform(torch.tensor([seed]), torch.tensor([position], dtype=torch.int32))
    assert drawn.item() == (mix(state) >> 12) * 2.0**-52


def test_the_largest_draw_stays_inside_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.zeros(1, 50_000)
    logits[0, -3:] = float("-inf")
    largest = torch.tensor([1 - 2.0**-52], dtype=torch.float64)
    monkeypatch.setattr("minisgl.ops.sampling.uniform", lambda seeds, positions: largest)
    assert draw(logits, make_inputs(1, top_k=50_000)).item() == 50_000 - 4
