"""Greedy output does not depend on how it was scheduled; Hugging Face says what it is."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, NamedTuple

import pytest

from minisgl import LLM
from tests.e2e.offline_harness import (
    CheckedLLM,
    Tiny,
    assert_idle,
    greedy_params,
    ids_of,
    random_prompts,
    rank_of,
)
from tests.tiny_models import TinyModel

NUM_TOKENS = 24


class Case(NamedTuple):
    """How one batch of prompts is scheduled.

    Attributes:
        cache: Prefix cache.
        is_overlap: Whether steps overlap.
        chunk: Prompt tokens of a step.
        page_size: Tokens of a page.
        pool: Times that the longest request fits into the pool.
        order: Of arrival.
        graph: Largest decode batch that runs from a graph.
    """

    cache: str
    is_overlap: bool
    chunk: int
    page_size: int
    pool: float
    order: str
    graph: int


PAGE_SIZES = (1, 4, 16, 64)
AXES: tuple[tuple[Any, ...], ...] = (  # Any: strings, flags and numbers, in the order of `Case`
    ("radix", "naive"),
    (True, False),
    (1, 3, 7, 16, 64, 1000),
    PAGE_SIZES,
    (12.0, 2.5, 1.0),
    ("given", "reversed", "shuffled"),
    (0, 4),
)
ALL_CASES = [Case(*values) for values in product(*AXES)]


def covering_cases() -> list[Case]:
    """Choose cases until every pair of values of two axes occurs."""
    axes = list(combinations(range(len(AXES)), 2))
    missing = {(i, j, a, b) for i, j in axes for a in AXES[i] for b in AXES[j]}
    chosen, source = [], random.Random(0)
    while missing:
        some = source.sample(ALL_CASES, 60)
        found = [{(i, j, case[i], case[j]) for i, j in axes} & missing for case in some]
        best = max(range(60), key=lambda k: len(found[k]))
        missing -= found[best]
        if found[best]:
            chosen.append(some[best])
    return chosen


@dataclass(frozen=True, slots=True)
class Work:
    """Prompts, some of which share prefixes or are the same, and what they lead to."""

    model: Tiny
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    model = Tiny.save(tmp_path_factory.mktemp("same_tokens"), TinyModel("qwen3", vocab_size=320))
    shared, *own = random_prompts((32, 8, 1, 5, 17, 8))
    prompts = [shared + own[0], shared[:16] + own[1], own[2], shared + own[3], own[3], own[3]]
    prompts += [own[4], shared]
    return Work(model, prompts, model.greedy(prompts, NUM_TOKENS))


def order_of(case: Case, num_prompts: int) -> list[int]:
    order = list(range(num_prompts))
    if case.order == "reversed":
        order.reverse()
    elif case.order == "shuffled":
        random.Random(case.chunk).shuffle(order)
    return order


def open_case(work: Work, case: Case) -> CheckedLLM:
    longest = max(map(len, work.prompts)) + NUM_TOKENS - 1  # the last token needs no KV
    return work.model.open_daring(
        cache=case.cache,
        overlap=case.is_overlap,
        max_prefill_length=case.chunk,
        page_size=case.page_size,
        num_page_override=-(-int(longest * case.pool + 1) // case.page_size),
        cuda_graph_max_bs=case.graph,
        prefill_graph_max_tokens=5 * case.graph,
    )


def assert_as_alone(work: Work, case: Case) -> int:
    """Run a case twice, the second time over a warm cache; return the retractions."""
    order = order_of(case, len(work.prompts))
    with open_case(work, case) as llm:
        for _ in range(2):
            outputs = llm.generate([work.prompts[i] for i in order], greedy_params(NUM_TOKENS))
            assert ids_of(outputs) == [work.expected[i] for i in order]
            assert_idle(llm)
        return llm.stats().num_retractions


@pytest.mark.parametrize("case", covering_cases(), ids=lambda case: "-".join(map(str, case)))
def test_the_schedule_does_not_change_the_tokens(work: Work, case: Case) -> None:
    assert_as_alone(work, case)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_no_schedule_changes_the_tokens(work: Work, page_size: int) -> None:
    for case in ALL_CASES:
        if case.page_size == page_size:
            assert_as_alone(work, case)


@pytest.mark.parametrize("is_overlap", [True, False])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_tight_pool_leads_to_retractions(work: Work, page_size: int, is_overlap: bool) -> None:
    case = Case("radix", is_overlap, 64, page_size, 1.5, "given", 0)
    assert assert_as_alone(work, case) > 0


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
@pytest.mark.parametrize("admission", ["optimistic", "reserve"])
def test_policy_and_admission_do_not_change_the_tokens(
    work: Work, policy: str, admission: str
) -> None:
    settings = {"policy": policy, "admission": admission, "max_prefill_steps": 1}
    with work.model.open(num_page_override=40, max_prefill_length=9, **settings) as llm:
        outputs = llm.generate(work.prompts, greedy_params(NUM_TOKENS))
        assert ids_of(outputs) == work.expected
        assert_idle(llm)
        if admission == "reserve":
            assert llm.stats().num_retractions == 0


def staggered(llm: LLM, work: Work, gap: int) -> Iterator[tuple[int, list[int]]]:
    """Start a stream every ``gap`` chunks of the others, and yield what each brings."""
    waiting = list(enumerate(work.prompts))
    running: list[tuple[int, Iterator[list[int]]]] = []
    turn = 0
    while waiting or running:
        if waiting and turn % gap == 0:
            i, prompt = waiting.pop(0)
            chunks = llm.stream(prompt, greedy_params(NUM_TOKENS))
            running.append((i, (chunk["token_ids"] for chunk in chunks)))
        turn += 1
        for i, chunks_of_ids in list(running):
            ids = next(chunks_of_ids, None)
            if ids is None:
                running.remove((i, chunks_of_ids))
            else:
                yield i, ids


@pytest.mark.parametrize("gap", [1, 3, 11])
@pytest.mark.parametrize("is_overlap", [True, False])
def test_requests_may_join_at_any_time(work: Work, is_overlap: bool, gap: int) -> None:
    case = Case("radix", is_overlap, 7, 4, 2.5, "given", 4)
    found: list[list[int]] = [[] for _ in work.prompts]
    with open_case(work, case) as llm:
        for i, ids in staggered(llm, work, gap):
            found[i] += ids
        assert_idle(llm)
    assert found == work.expected


def test_a_graph_is_really_replayed(work: Work) -> None:
    with open_case(work, Case("radix", True, 64, 4, 12.0, "given", 4)) as llm:
        assert rank_of(llm)._engine._graphs.sizes == (1, 2, 4)
