"""Stage 4, faster and bigger: two ranks, and replayed graphs, leave the output unchanged."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl import LLM
from tests.e2e.offline_harness import Tiny, assert_idle, greedy_params, ids_of, random_prompts
from tests.tiny_models import TinyModel

NUM_TOKENS = 12
LENGTHS = (3, 17, 8, 30, 5, 12)
CHANGES: list[dict[str, Any]] = [
    {"tp": 2},
    {"cuda_graph_max_bs": 8, "prefill_graph_max_tokens": 64},
    {"tp": 2, "cuda_graph_max_bs": 4, "prefill_graph_max_tokens": 32},
]


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    spec = TinyModel(request.param, num_heads=8, num_kv_heads=2)  # 331 tokens: padded
    return Tiny.save(tmp_path_factory.mktemp(f"stage_4_{request.param}"), spec)


@pytest.fixture(scope="module")
def expected(tiny: Tiny) -> list[list[int]]:
    return tiny.greedy(random_prompts(LENGTHS), NUM_TOKENS)


def generate(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(random_prompts(LENGTHS), greedy_params(NUM_TOKENS))
    assert_idle(llm)
    return ids_of(outputs)


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_the_tokens_are_those_of_hugging_face(
    tiny: Tiny, expected: list[list[int]], changes: dict[str, Any]
) -> None:
    with tiny.open(**changes) as llm:
        assert generate(llm) == expected
