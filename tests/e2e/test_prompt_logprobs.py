"""Log-probabilities of prompts: those of Hugging Face, whatever chunks, cache and company do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.completion import Completion
from minisgl.errors import RequestError
from tests.e2e.offline_harness import Tiny, assert_idle, greedy_params, ids_of, random_prompts
from tests.tiny_models import TinyModel

SCORE = SamplingParams(max_tokens=0, prompt_logprobs=3)
PROMPTS = random_prompts((33, 70, 9, 1, 70))
# The same float32 arithmetic in another order.
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny.save(tmp_path_factory.mktemp("scores"), TinyModel("qwen3", vocab_size=320))


@torch.inference_mode()
def check(tiny: Tiny, prompts: Sequence[list[int]], outputs: Sequence[Completion]) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        scores = output["prompt_logprobs"]
        assert scores is not None
        assert scores[0] is None
        assert len(scores) == len(prompt)
        logprobs = tiny.hf_model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        for position, score in enumerate(scores[1:]):
            assert score is not None
            assert score["token_id"] == prompt[position + 1]
            wanted = float(logprobs[position, prompt[position + 1]])
            assert score["logprob"] == pytest.approx(wanted, abs=TOLERANCE)
            top = logprobs[position].topk(3)
            assert list(score["top"]) == top.indices.tolist()
            assert list(score["top"].values()) == pytest.approx(top.values.tolist(), abs=TOLERANCE)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("settings", [{}, {"overlap": False}, {"max_prefill_length": 16}], ids=str)
def test_they_are_those_of_the_model_at_every_time(
    tiny: Tiny, page_size: int, settings: dict[str, Any]
) -> None:
    with tiny.open(page_size=page_size, **settings) as llm:
        for _ in range(2):  # the second time the prefix cache has everything
            outputs = llm.generate(PROMPTS, SCORE)
            check(tiny, PROMPTS, outputs)
            assert [o["usage"]["completion_tokens"] for o in outputs] == [0] * len(PROMPTS)
            assert [o["finish_reason"] for o in outputs] == ["length"] * len(PROMPTS)
        assert_idle(llm)


def test_asking_changes_no_token_and_the_others_share_the_prefix(tiny: Tiny) -> None:
    prompt = PROMPTS[1]
    asking = SamplingParams(max_tokens=8, ignore_eos=True, prompt_logprobs=0, logprobs=1)
    with tiny.open() as llm:
        outputs = llm.generate([prompt] * 3, [asking, greedy_params(8), asking])
        (plain,) = llm.generate([prompt], greedy_params(8))
    assert ids_of(outputs) == [plain["token_ids"]] * 3
    assert [o["usage"]["cached_tokens"] for o in outputs][::2] == [0, 0]
    assert plain["usage"]["cached_tokens"] > 0
    assert [each and each["top"] for each in outputs[0]["prompt_logprobs"] or []][1] == {}


def test_a_request_that_was_sent_back_says_each_once(tiny: Tiny) -> None:
    prompts = random_prompts((20, 20, 20, 20), seed=4)
    params = SamplingParams(max_tokens=40, ignore_eos=True, prompt_logprobs=3)
    with tiny.open_daring(num_page_override=26, max_prefill_length=12) as llm:
        outputs = llm.generate(prompts, params)
        assert llm.stats().num_retractions > 0
        check(tiny, prompts, outputs)
    assert ids_of(outputs) == tiny.greedy(prompts, 40)


def test_a_prefill_from_graphs_gives_the_same(tiny: Tiny) -> None:
    with tiny.open(prefill_graph_max_tokens=64) as llm:
        check(tiny, PROMPTS[2:4], llm.generate(PROMPTS[2:4], SCORE))  # fits into a graph
        check(tiny, PROMPTS[:2], llm.generate(PROMPTS[:2], SCORE))  # does not


def test_choices_are_all_scored(tiny: Tiny) -> None:
    params = SamplingParams(max_tokens=2, n=3, temperature=1.0, seed=1, prompt_logprobs=3)
    with tiny.open() as llm:
        (output,) = llm.generate([PROMPTS[0]], params)
    for choice in output["choices"]:
        check(tiny, [PROMPTS[0]], [{**output, **choice}])


def test_no_tokens_at_all_need_a_reason(tiny: Tiny) -> None:
    with pytest.raises(RequestError, match="max_tokens 0: must be an integer from 1"):
        SamplingParams(max_tokens=0)
    with pytest.raises(RequestError, match="prompt_logprobs 21: "):
        SamplingParams(prompt_logprobs=21)


def test_two_ranks_say_the_same(tiny: Tiny) -> None:
    with LLM(str(tiny.folder), tp=2, num_page_override=128) as llm:
        check(tiny, PROMPTS[:3], llm.generate(PROMPTS[:3], SCORE))
