"""Stage 1, computing it right: the same prompt, the same 16 tokens, and four requests at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from minisgl import LLM, SamplingParams
from tests.e2e.offline_harness import Tiny, assert_idle, ids_of
from tests.tiny_models import TinyModel

PROMPTS = ["The capital of France is", "List three", "def fibonacci(n):", "a"]
PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny.save(tmp_path_factory.mktemp("stage_1"), TinyModel("qwen3", vocab_size=320))


@pytest.fixture(scope="module")
def llm(tiny: Tiny) -> Iterator[LLM]:
    with tiny.open() as llm:
        yield llm


def expected(tiny: Tiny, llm: LLM, prompts: list[str]) -> list[list[int]]:
    return tiny.greedy([llm.tokenizer(prompt)["input_ids"] for prompt in prompts], 16)


def test_one_prompt_gives_the_16_tokens_of_hugging_face(tiny: Tiny, llm: LLM) -> None:
    assert ids_of(llm.generate(PROMPTS[0], PARAMS)) == expected(tiny, llm, PROMPTS[:1])


def test_four_requests_run_in_one_batch(tiny: Tiny, llm: LLM) -> None:
    before = llm.stats()
    outputs = llm.generate(PROMPTS, PARAMS)
    after = llm.stats()
    assert ids_of(outputs) == expected(tiny, llm, PROMPTS)
    assert after.num_prefill_steps - before.num_prefill_steps == 1
    assert after.num_decode_steps - before.num_decode_steps == 15
    assert_idle(llm)
