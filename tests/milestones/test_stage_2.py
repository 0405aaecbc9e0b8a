"""Stage 2, scheduling it well: 8 requests in one call, their shared prefix computed once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.offline_harness import Tiny, assert_idle, greedy_params, ids_of, random_prompts
from tests.tiny_models import TinyModel

NUM_REQS, SHARED, OWN, NUM_TOKENS = 8, 64, 8, 12


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny.save(tmp_path_factory.mktemp("stage_2"), TinyModel("qwen3", vocab_size=320))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    shared, *own = random_prompts((SHARED, *[OWN] * NUM_REQS))
    return [shared + tail for tail in own]


@pytest.fixture(scope="module")
def expected(tiny: Tiny, prompts: list[list[int]]) -> list[list[int]]:
    return tiny.greedy(prompts, NUM_TOKENS)


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("settings", [{}, {"overlap": False}, {"max_prefill_length": 24}], ids=str)
def test_a_shared_prefix_is_computed_once(
    tiny: Tiny,
    prompts: list[list[int]],
    expected: list[list[int]],
    page_size: int,
    settings: dict[str, Any],
) -> None:
    with tiny.open(page_size=page_size, **settings) as llm:
        outputs = llm.generate(prompts, greedy_params(NUM_TOKENS))
        stats = llm.stats()
        assert_idle(llm)
    assert ids_of(outputs) == expected
    assert stats.num_prefill_tokens == SHARED + NUM_REQS * OWN
    assert stats.num_cached_tokens == (NUM_REQS - 1) * SHARED
    assert sorted(o["usage"]["cached_tokens"] for o in outputs) == [0, *[SHARED] * (NUM_REQS - 1)]


def test_without_a_cache_it_is_computed_for_each(
    tiny: Tiny, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    with tiny.open(cache="naive") as llm:
        assert ids_of(llm.generate(prompts, greedy_params(NUM_TOKENS))) == expected
        assert llm.stats().num_prefill_tokens == NUM_REQS * (SHARED + OWN)
