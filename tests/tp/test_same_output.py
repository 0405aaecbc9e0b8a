"""Groups of 2 and 4 gloo processes against one rank, float32 on a CPU, token by token.

Sums over ranks are in another order, so logits differ in their last bits (1e-5 of about 5). Greedy
output is the same all the same, because two tokens of these models are never that close: models,
prompts and weights are fixed, so a case that passes once passes always on one kind of CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _pytest.mark.structures import ParameterSet

from minisgl.sampling_params import SamplingParams
from tests.tiny_models import ARCHITECTURES, TinyModel
from tests.tp.group_harness import Group, open_group
from tests.tp.rank_pool import RankPool

ModelFolder = Callable[[str, TinyModel], Path]

CASES: dict[str, TinyModel] = {  # the vocabulary has 331 tokens: prime
    **{arch: TinyModel(arch, num_heads=8, num_kv_heads=4) for arch in ARCHITECTURES},
    "one kv head": TinyModel("qwen3", num_heads=8, num_kv_heads=1),
    "two kv heads and tied": TinyModel("llama", num_heads=8, num_kv_heads=2, is_tied=True),
    "biases": TinyModel(
        "llama", num_heads=4, num_kv_heads=2, extra={"attention_bias": True, "mlp_bias": True}
    ),
    "vocabulary of three more": TinyModel("mistral", vocab_size=323, num_kv_heads=4),
}
QUICK = (("qwen2", 2), ("mixtral", 2), ("two kv heads and tied", 4))

NUM_REQS = 14
LONG = (1, 2, 3)
# Optimistic admission leaves room for 64 more tokens of each request. The long ones start side
# by side then, and do not end so: 50 pages of 4 tokens are too few.
TIGHT: dict[str, Any] = {
    "num_page_override": 50,
    "page_size": 4,
    "max_running_req": 6,
    "max_prefill_length": 16,
}


def prompts_with_shared_prefixes() -> list[list[int]]:
    rng = np.random.default_rng(5)
    stems = [rng.integers(5, 320, size=12).tolist() for _ in range(3)]
    return [
        stems[i % 3] + rng.integers(5, 320, size=1 + int(rng.integers(0, 14))).tolist()
        for i in range(NUM_REQS)
    ]


def lengths() -> list[int]:
    short = np.random.default_rng(6).integers(4, 14, size=NUM_REQS)
    return [90 if i in LONG else int(n) for i, n in enumerate(short)]


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True)


def run_workload(group: Group) -> None:
    """Let requests arrive at any time, and abort every sixth when it has run for a while."""
    rng = np.random.default_rng(7)
    for uid, (prompt, length) in enumerate(
        zip(prompts_with_shared_prefixes(), lengths(), strict=True)
    ):
        group.add(uid, prompt, greedy(length))
        for _ in range(int(rng.integers(0, 3))):
            group.step()
        if uid % 6 == 0 and uid:
            group.abort(uid - 1)
    group.run()


def cases() -> Iterator[ParameterSet]:
    for case in CASES:
        for tp in (2, 4):
            marks = () if (case, tp) in QUICK else pytest.mark.slow
            yield pytest.param(case, tp, marks=marks)


@pytest.mark.parametrize(("case", "tp"), list(cases()))
def test_ranks_generate_what_one_rank_does(
    case: str, tp: int, model_folder: ModelFolder, pool: RankPool
) -> None:
    folder = model_folder(case, CASES[case])
    with open_group(folder, 1, pool) as one:
        for uid, prompt in enumerate(prompts_with_shared_prefixes()):
            one.add(uid, prompt, greedy(lengths()[uid]))
        one.run()
    with open_group(folder, tp, pool, TIGHT) as group:
        run_workload(group)
        stats = group.ranks.stats()
    for uid in range(NUM_REQS):
        if group.finished[uid].reason == "abort":
            assert group.tokens[uid] == one.tokens[uid][: len(group.tokens[uid])]
        else:
            assert group.tokens[uid] == one.tokens[uid], f"request {uid}"
    assert stats.num_finished["abort"] > 0
    assert stats.num_finished["length"] == NUM_REQS - stats.num_finished["abort"]
    assert stats.num_retractions > 0
    assert stats.num_cached_tokens > 0
    assert stats.num_prefill_steps > NUM_REQS, "long prompts run in chunks"
