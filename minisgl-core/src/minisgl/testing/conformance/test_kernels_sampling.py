"""What the op ``sample`` of every kernel set has to do; see `minisgl.ops.contract.Sample`.

Which token a seed leads to is a set's own choice, so distributions are compared, over fixed seeds:
a set that passes once passes always.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from minisgl.ops.contract import KernelConfig, KernelSet, Sample, SamplingHints, SamplingInputs
from minisgl.testing.reference import Filters, sampling_weights
from minisgl.testing.selection import TestedBackend

NUM_DRAWS = 4096

FILTERS = (
    Filters(),
    Filters(temperature=0.5),
    Filters(temperature=3.0),
    Filters(top_k=1),
    Filters(top_k=5),
    Filters(top_p=0.05),
    Filters(top_p=0.7),
    Filters(min_p=0.2),
    Filters(top_k=12, top_p=0.8),
    Filters(temperature=1.5, top_k=20, top_p=0.9, min_p=0.05),
)


class Sampler(NamedTuple):
    """The op under test and where it runs."""

    op: Sample
    device: torch.device

    def draw(
        self, logits: Tensor, filters: Sequence[Filters], seeds: Sequence[int], position: int = 7
    ) -> Tensor:
        """Sample a batch of rows."""
        inputs = self.inputs(filters, seeds, position)
        tokens = self.op(logits, inputs, False)
        assert tokens.dtype == torch.int32, "sample returns int32"
        assert tokens.shape == (len(logits),), "sample returns one token per row"
        return tokens

    def inputs(
        self, filters: Sequence[Filters], seeds: Sequence[int], position: int = 7
    ) -> SamplingInputs:
        """Make the parameters of a batch."""
        columns = list(zip(*filters, strict=True))
        floats = [torch.tensor(c, dtype=torch.float32, device=self.device) for c in columns]
        return SamplingInputs(
            temperature=floats[0],
            top_k=torch.tensor(columns[1], dtype=torch.int32, device=self.device),
            top_p=floats[2],
            min_p=floats[3],
            seeds=torch.tensor(seeds, dtype=torch.int64, device=self.device),
            positions=torch.full((len(seeds),), position, dtype=torch.int32, device=self.device),
        )

    def logits(self, num_rows: int, vocab_size: int = 61, seed: int = 0) -> Tensor:
        """Return random logits without ties."""
        random = torch.Generator().manual_seed(seed)
        return (torch.randn(num_rows, vocab_size, generator=random) * 2).to(self.device)


@pytest.fixture
def sampler(backend: TestedBackend) -> Sampler:
    """The set's sampler."""
    dtype = "float32" if not backend.refusal(dtype="float32") else "bfloat16"
    device = torch.device(backend.machine.device)
    config = KernelConfig(device=device, dtype=getattr(torch, dtype))
    made: KernelSet = backend.build(config)
    if "sample" not in made.ops():
        pytest.skip("the set leaves sample to others")
    return Sampler(made.ops()["sample"], device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [2, 61, 1024, 50_257])
def test_greedy_rows_take_the_likeliest_token(
    sampler: Sampler, vocab_size: int, dtype: torch.dtype
) -> None:
    likeliest = [i * 37 % vocab_size for i in range(9)]
    logits = torch.zeros(9, vocab_size, dtype=dtype, device=sampler.device)
    logits[range(9), likeliest] = 1.0
    inputs = sampler.inputs([Filters(temperature=0)] * 9, range(9))
    for is_all_greedy in (True, False):
        tokens = sampler.op(logits, inputs, is_all_greedy)
        assert tokens.tolist() == likeliest, "a temperature of 0 takes the likeliest token"
        assert tokens.dtype == torch.int32, "sample returns int32"


@pytest.mark.parametrize("filters", FILTERS, ids=lambda f: ",".join(f"{x:g}" for x in f))
def test_tokens_are_drawn_by_their_probability(sampler: Sampler, filters: Filters) -> None:
    logits = sampler.logits(1)
    expected = sampling_weights(logits[0], filters).cpu()
    rows = logits.expand(NUM_DRAWS, -1).contiguous()
    tokens = sampler.draw(rows, [filters] * NUM_DRAWS, range(NUM_DRAWS))
    counts = torch.bincount(tokens.cpu(), minlength=len(expected)).double()
    assert not counts[expected == 0].any(), "a token that the filters drop is never sampled"
    # Six standard deviations of each count, and one for rounding.
    allowed = 6 * (NUM_DRAWS * expected * (1 - expected)).sqrt() + 1
    off = (counts - NUM_DRAWS * expected).abs()
    assert (off <= allowed).all(), "each token is sampled with its probability after the filters"


def test_positions_are_as_good_as_seeds(sampler: Sampler) -> None:
    logits = sampler.logits(1)
    expected = sampling_weights(logits[0], Filters()).cpu()
    draws = [sampler.draw(logits, [Filters()], [5], position)[0] for position in range(1000)]
    counts = torch.bincount(torch.stack(draws).cpu(), minlength=len(expected)).double()
    allowed = 6 * (1000 * expected * (1 - expected)).sqrt() + 1
    off = (counts - 1000 * expected).abs()
    assert (off <= allowed).all(), "positions of one seed draw independently"


def test_neighbouring_seeds_and_positions_do_not_share_draws(sampler: Sampler) -> None:
    logits = torch.zeros(1, 1 << 16, device=sampler.device).expand(64, -1).contiguous()
    filters = [Filters()] * 64
    here = sampler.draw(logits, filters, range(64), position=10)
    there = sampler.draw(logits, filters, range(64), position=11)
    assert len(set(here.tolist()) | set(there.tolist())) > 120, (
        "each pair of seed and position has a draw of its own"
    )


def test_a_row_does_not_depend_on_who_shares_its_batch(sampler: Sampler) -> None:
    logits = sampler.logits(10)
    seeds = [s * 1_000_003 - 2**40 for s in range(10)]
    together = sampler.draw(logits, FILTERS, seeds).tolist()
    torch.manual_seed(12345)
    alone = [
        int(sampler.draw(logits[i : i + 1], FILTERS[i : i + 1], seeds[i : i + 1]))
        for i in range(10)
    ]
    backwards = sampler.draw(logits.flip(0), FILTERS[::-1], seeds[::-1]).tolist()
    greedy = [Filters(temperature=0)] * 10
    mixed = sampler.draw(logits.repeat(2, 1), [*FILTERS, *greedy], [*seeds, *seeds]).tolist()
    rule = "a row's result depends on its logits, parameters, seed and position alone"
    assert alone == together, rule
    assert backwards[::-1] == together, rule
    assert mixed[:10] == together, rule


def test_the_same_call_gives_the_same_tokens(sampler: Sampler) -> None:
    logits = sampler.logits(50, vocab_size=1000)
    filters = [FILTERS[i % len(FILTERS)] for i in range(50)]
    first = sampler.draw(logits, filters, range(50))
    assert torch.equal(sampler.draw(logits, filters, range(50)), first), "sampling is repeatable"


def test_logits_are_not_changed(sampler: Sampler) -> None:
    logits = sampler.logits(10)
    before = logits.clone()
    sampler.draw(logits, FILTERS, range(10))
    assert torch.equal(logits, before), "sample does not change the logits"


def test_hints_change_no_result(sampler: Sampler) -> None:
    logits = sampler.logits(200)
    for chosen, hints in (
        ([FILTERS[0], FILTERS[1]], SamplingHints(top_width=0, has_min_p=False)),
        ([FILTERS[3], FILTERS[4]], SamplingHints(top_width=5, has_min_p=False)),
        ([FILTERS[7], FILTERS[2]], SamplingHints(top_width=0, has_min_p=True)),
        ([FILTERS[8], FILTERS[9]], SamplingHints(top_width=20, has_min_p=True)),
        ([FILTERS[6], FILTERS[5]], SamplingHints(top_width=61, has_min_p=False)),
    ):
        inputs = sampler.inputs(chosen * 100, range(200))
        free, hinted = sampler.op(logits, inputs, False), sampler.op(logits, inputs, False, hints)
        assert torch.equal(free, hinted), "hints never change a result"


def test_masked_tokens_are_never_sampled(sampler: Sampler) -> None:
    logits = sampler.logits(60)
    allowed = torch.zeros_like(logits, dtype=torch.bool)
    for row in range(60):
        allowed[row, row : row + 1 + row % 3] = True
    masked = logits.masked_fill(~allowed, float("-inf"))
    filters = [(*FILTERS, Filters(temperature=0))[i % 11] for i in range(60)]
    tokens = sampler.draw(masked, filters, range(60)).long()
    assert allowed[range(60), tokens].all(), "a token with a logit of -inf is never sampled"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_row_harms_nobody_else(sampler: Sampler, bad: float) -> None:
    logits = sampler.logits(10)
    expected = sampler.draw(logits, FILTERS, range(10)).tolist()
    logits[4] = bad
    tokens = sampler.draw(logits, FILTERS, range(10)).tolist()
    assert tokens[:4] + tokens[5:] == expected[:4] + expected[5:], "rows are independent"
    assert 0 <= tokens[4] < 61, "even a row without numbers gives an id of the vocabulary"


def test_a_large_vocabulary(sampler: Sampler) -> None:
    logits = torch.full((8, 151_936), -20.0, device=sampler.device)
    logits[:, 77_000:77_004] = 5.0
    tokens = sampler.draw(logits, [Filters(top_k=50, top_p=0.95)] * 8, range(8))
    assert ((tokens >= 77_000) & (tokens < 77_004)).all(), "the likely tokens are sampled"
