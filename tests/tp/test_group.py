"""What ranks of a group agree on, and what happens when they do not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from minisgl.device import set_cpu_threads
from minisgl.errors import IntegrityError
from minisgl.sampling_params import SamplingParams
from tests.tiny_models import TinyModel
from tests.tp.group_harness import ROOMY, open_group, settings_for
from tests.tp.rank_pool import RankPool

ModelFolder = Callable[[str, TinyModel], Path]
TINY = TinyModel("llama", num_heads=8, num_kv_heads=2)
PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]
RANDOM = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)


def test_unseeded_requests_differ_between_starts_and_not_between_ranks(
    model_folder: ModelFolder, pool: RankPool
) -> None:
    outputs = []
    for _ in range(2):
        # A rank that samples another token than rank 0 fails at its next step.
        with open_group(model_folder("tiny", TINY), 2, pool) as group:
            outputs.append(group.generate(PROMPTS, RANDOM))
            outputs.append(group.generate(PROMPTS, RANDOM))
    assert all(a != b for i, a in enumerate(outputs) for b in outputs[:i])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=12, temperature=1.0, top_p=0.9, seed=3, ignore_eos=True),
        SamplingParams(max_tokens=12, repetition_penalty=1.5, presence_penalty=0.5),
        SamplingParams(max_tokens=12, min_tokens=5, logit_bias={2: 100.0, 17: 5.0}),
    ],
    ids=["seed", "penalties", "least length"],
)
def test_requests_get_what_they_get_on_one_rank(
    model_folder: ModelFolder, pool: RankPool, params: SamplingParams
) -> None:
    folder = model_folder("tiny", TINY)
    with open_group(folder, 1, pool) as one:
        expected = one.generate(PROMPTS, params)
    with open_group(folder, 2, pool) as two:
        assert two.generate(PROMPTS, params) == expected


def test_the_pool_is_that_of_the_rank_with_the_fewest_pages(
    model_folder: ModelFolder, pool: RankPool
) -> None:
    folder = model_folder("tiny", TINY)
    few = {**ROOMY, "tp": 2, "num_page_override": 40}
    pool.settings[1] = settings_for(folder, **few)[0]
    try:
        with open_group(folder, 2, pool) as group:
            assert group.ranks.limits.num_pages == 40
            assert [facts.limits["num_pages"] for facts in pool.facts] == [40]
            assert len(group.generate(PROMPTS, RANDOM)[0]) == 12
    finally:
        pool.settings.clear()


def test_a_rank_that_samples_another_token_ends_the_group_loudly(
    model_folder: ModelFolder, pool: RankPool
) -> None:
    pool.wrong_step[1] = 4
    try:
        with open_group(model_folder("tiny", TINY), 2, pool) as group:
            with pytest.raises(IntegrityError, match="rank 1 has parted from rank 0"):
                group.generate(PROMPTS, RANDOM)
            assert "parted" in group.ranks.failure
            assert 4 <= len(group.tokens[0]) <= 6, "it is noticed at the next step"
    finally:
        pool.wrong_step.clear()


@pytest.fixture
def threads_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """What a rank on its own would use, where the user says nothing."""
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    yield set_cpu_threads(1)
    torch.set_num_threads(before)


def test_ranks_divide_the_cpu_threads(model_folder: ModelFolder, threads_of_one_rank: int) -> None:
    pool = RankPool()  # its processes take over this environment
    with open_group(model_folder("tiny", TINY), 2, pool) as group:
        assert len(group.generate(PROMPTS, RANDOM)[0]) == 12
        assert [facts.num_threads for facts in pool.facts] == [max(1, threads_of_one_rank // 2)]
    pool.close()


@pytest.mark.slow
def test_a_group_may_be_idle_for_longer_than_its_time_limit(
    model_folder: ModelFolder, pool: RankPool
) -> None:
    folder = model_folder("tiny", TINY)
    with open_group(folder, 2, pool):
        pass  # now torch is loaded, and the ranks meet in time
    with open_group(folder, 2, pool, {**ROOMY, "distributed_timeout_s": 15.0}) as group:
        before = group.generate(PROMPTS, SamplingParams(max_tokens=3, ignore_eos=True))
        time.sleep(16)
        assert group.generate(PROMPTS, SamplingParams(max_tokens=3, ignore_eos=True)) == before


@pytest.mark.slow
def test_a_rank_needs_memory_for_its_share_and_one_tensor(
    model_folder: ModelFolder, pool: RankPool
) -> None:
    # Embedding and head of 160 MB each, and little else: a quarter of it is 80 MB.
    spec = TinyModel("llama", vocab_size=80_000, hidden_size=512, num_heads=8, num_kv_heads=4)
    folder = model_folder("large vocabulary", spec)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert size > 320e6
    with open_group(folder, 4, pool):
        for facts in pool.facts:
            # One tensor's slice is 40 MB; the rest is slack for the allocator and the KV pool.
            assert facts.grown_bytes < size / 4 + 40e6 + 60e6
