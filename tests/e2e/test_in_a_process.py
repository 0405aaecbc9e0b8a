"""How an `LLM` behaves as a guest in somebody's process."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from minisgl import LLM, SamplingParams
from tests.e2e.offline_harness import (
    Tiny,
    assert_idle,
    greedy_params,
    ids_of,
    random_prompts,
    rank_of,
)
from tests.tiny_models import TinyModel

PROMPTS = random_prompts((9, 21, 3, 14))
NUM_TOKENS = 12
SAMPLED = SamplingParams(max_tokens=8, temperature=1.0, seed=3, top_p=0.9, n=2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny.save(tmp_path_factory.mktemp("process"), TinyModel("llama", vocab_size=320))


@pytest.fixture(scope="module")
def other_tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    spec = TinyModel("mixtral", vocab_size=320, seed=5)
    return Tiny.save(tmp_path_factory.mktemp("other"), spec)


@pytest.fixture(scope="module")
def llm(tiny: Tiny) -> Iterator[LLM]:
    with tiny.open() as llm:
        yield llm


def test_an_idle_llm_uses_no_cpu(llm: LLM) -> None:
    llm.generate(PROMPTS, greedy_params(NUM_TOKENS))
    start = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - start < 0.02


def test_an_llm_starts_no_threads(tiny: Tiny) -> None:
    before = threading.enumerate()
    with tiny.open() as llm:
        llm.generate(PROMPTS, greedy_params(3))
        assert threading.enumerate() == before


def test_no_global_random_state_is_touched(tiny: Tiny) -> None:
    python, numpy, ours = random.getstate(), np.random.get_state(), torch.get_rng_state()
    with tiny.open() as llm:
        llm.generate(PROMPTS, SAMPLED)
        llm.generate(PROMPTS, SamplingParams(max_tokens=4, temperature=1.0))
    with tiny.open(dummy_weight=True) as llm:
        llm.generate(PROMPTS, greedy_params(2))
    assert random.getstate() == python
    after = np.random.get_state()
    assert all(np.array_equal(a, b) for a, b in zip(after, numpy, strict=True))
    assert torch.equal(torch.get_rng_state(), ours)


def test_global_torch_settings_are_left_alone(tiny: Tiny) -> None:
    before = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    with tiny.open() as llm:
        llm.generate(PROMPTS, greedy_params(2))
    after = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    assert after == before
    leaf = torch.ones(2, requires_grad=True)
    (leaf * 2).sum().backward()


def test_two_llms_live_side_by_side(tiny: Tiny, other_tiny: Tiny) -> None:
    with tiny.open() as first, other_tiny.open(page_size=16, cache="naive") as second:
        streams = [llm.stream(PROMPTS[1], greedy_params(NUM_TOKENS)) for llm in (first, second)]
        found: list[list[int]] = [[], []]
        for _ in range(NUM_TOKENS + 1):
            for ids, chunks in zip(found, streams, strict=True):
                ids += next(chunks, {"token_ids": []})["token_ids"]
        assert found[0] == tiny.greedy(PROMPTS[1:2], NUM_TOKENS)[0]
        assert found[1] == other_tiny.greedy(PROMPTS[1:2], NUM_TOKENS)[0]
        first.shutdown()
        wanted = other_tiny.greedy(PROMPTS, NUM_TOKENS)
        assert ids_of(second.generate(PROMPTS, greedy_params(NUM_TOKENS))) == wanted


def test_an_llm_may_be_made_and_used_in_another_thread(tiny: Tiny) -> None:
    def work() -> list[list[int]]:
        with tiny.open() as llm:
            return ids_of(llm.generate(PROMPTS, greedy_params(NUM_TOKENS)))

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(work).result() == tiny.greedy(PROMPTS, NUM_TOKENS)


def test_threads_share_one_llm(tiny: Tiny, llm: LLM) -> None:
    prompts = random_prompts([3 + i % 19 for i in range(24)], seed=9)
    expected = tiny.greedy(prompts, NUM_TOKENS)

    def one(i: int) -> list[int]:
        if i % 3 == 0:
            chunks = llm.stream(prompts[i], greedy_params(NUM_TOKENS))
            return [token for chunk in chunks for token in chunk["token_ids"]]
        return llm.generate([prompts[i]], greedy_params(NUM_TOKENS))[0]["token_ids"]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(len(prompts)))) == expected
    assert_idle(llm)


@pytest.mark.parametrize("is_shut_down", [True, False])
def test_a_deleted_llm_gives_its_memory_back(tiny: Tiny, is_shut_down: bool) -> None:
    llm = tiny.open(cuda_graph_max_bs=2)
    llm.generate(PROMPTS, SAMPLED)
    list(llm.stream(PROMPTS[0], greedy_params(3)))
    held: list[weakref.ref[object]] = [
        weakref.ref(llm),
        weakref.ref(rank_of(llm)._engine),
        weakref.ref(rank_of(llm)._engine._ctx.kv_pool),
    ]
    if is_shut_down:
        llm.shutdown()
    del llm
    gc.collect()
    assert [ref() for ref in held] == [None, None, None]


def test_an_open_stream_ends_when_its_llm_is_shut_down(tiny: Tiny) -> None:
    llm = tiny.open()
    chunks = llm.stream(PROMPTS[0], greedy_params(100))
    next(chunks)
    llm.shutdown()
    assert list(chunks)[-1]["finish_reason"] == "abort"
    assert_idle(llm)


def test_what_one_call_left_behind_does_not_change_the_next(tiny: Tiny, llm: LLM) -> None:
    wanted = tiny.greedy(PROMPTS, NUM_TOKENS)
    for params in (SAMPLED, SamplingParams(max_tokens=3, logit_bias={7: 100}), SAMPLED):
        llm.generate(PROMPTS, params)
        assert ids_of(llm.generate(PROMPTS, greedy_params(NUM_TOKENS))) == wanted
