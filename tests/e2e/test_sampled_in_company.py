"""A seeded or edited request gets the same result alone and in company, however it is scheduled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from minisgl import LLM, SamplingParams
from minisgl.completion import Choice, Completion
from tests.e2e.offline_harness import CheckedLLM, Tiny, assert_idle, random_prompts
from tests.tiny_models import TinyModel

NUM_TOKENS = 20
EOS = 2
LONGEST = 30 + NUM_TOKENS

PARAMS: dict[str, dict[str, Any]] = {  # fields of SamplingParams
    "plain": {"temperature": 1.0, "seed": 1},
    "hot": {"temperature": 3.0, "seed": 2**64 - 1},
    "top-k": {"temperature": 0.7, "top_k": 5, "seed": 2},
    "top-p": {"temperature": 1.3, "top_p": 0.8, "seed": 3},
    "min-p": {"temperature": 1.0, "min_p": 0.1, "seed": -4},
    "all filters": {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 5},
    "repetition": {"repetition_penalty": 1.4},
    "presence and frequency": {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    "penalties and a seed": {
        "temperature": 1.0,
        "seed": 6,
        "repetition_penalty": 0.8,
        "frequency_penalty": 1.1,
        "presence_penalty": -0.5,
    },
    "bias": {"logit_bias": {17: 6.5, 40: -100.0}},
    "bias and a seed": {"temperature": 1.0, "seed": 7, "logit_bias": {17: 3.0, 41: 2.0}},
    "at least so many": {"min_tokens": 6, "logit_bias": {EOS: 100.0}, "ignore_eos": False},
    "at least so many of a stop id": {
        "min_tokens": 3,
        "logit_bias": {90: 50.0},
        "stop_token_ids": (90,),
    },
    "log-probabilities": {"logprobs": 3},
    "log-probabilities of samples": {"temperature": 1.0, "seed": 8, "logprobs": 0},
    "three choices": {"temperature": 1.0, "seed": 9, "n": 3},
    "greedy": {},
    "may stop": {"temperature": 4.0, "seed": 10, "ignore_eos": False, "stop_token_ids": (31, 77)},
}

SCHEDULES: dict[str, dict[str, Any]] = {  # settings
    "together": {},
    "without overlap": {"overlap": False},
    "without a cache": {"cache": "naive"},
    "in chunks of 1": {"max_prefill_length": 1},
    "in chunks of 7, no overlap": {"max_prefill_length": 7, "overlap": False},
    "from graphs": {"cuda_graph_max_bs": 4},
    "from graphs, no overlap": {"cuda_graph_max_bs": 32, "overlap": False},
    "retracted": {"num_page_override": -(-LONGEST // 4) + 2},
    "retracted, in chunks of 5": {"num_page_override": 16, "max_prefill_length": 5},
    "retracted, no overlap": {"num_page_override": 16, "overlap": False},
    "retracted, from graphs": {"num_page_override": 20, "cuda_graph_max_bs": 8},
    "one at a time": {"max_running_req": 1},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny.save(tmp_path_factory.mktemp("company"), TinyModel("qwen2", vocab_size=320))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    shared, *own = random_prompts((20, *range(1, 10)), seed=3)
    return [shared[: 5 * (i % 5)] + own[i % len(own)] for i in range(len(PARAMS) + 1)]


@pytest.fixture(scope="module")
def alone(tiny: Tiny, prompts: list[list[int]]) -> list[Completion]:
    """Each request on its own, scheduled in the plainest way; the last one has a stop string."""
    settings = {"overlap": False, "cache": "naive", "page_size": 1, "num_page_override": 1024}
    with tiny.open(**settings) as llm:
        params = [make_params(**fields) for fields in PARAMS.values()]
        outputs = [run(llm, [p], [each])[0] for p, each in zip(prompts, params, strict=False)]
        outputs += run(llm, prompts[-1:], [stop_params(llm, prompts[-1])])
        return outputs


def make_params(**fields: Any) -> SamplingParams:  # Any: fields of every type
    return SamplingParams(**({"max_tokens": NUM_TOKENS, "ignore_eos": True} | fields))


def stop_params(llm: LLM, prompt: list[int]) -> SamplingParams:
    """Make parameters whose stop string begins and ends within tokens of the plain answer."""
    text = llm.generate([prompt], make_params())[0]["text"]
    middle = len(text) // 2
    return make_params(stop=(text[middle : middle + 2], "never"))


def run(
    llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
) -> list[Completion]:
    outputs = llm.generate(prompts, params)
    assert_idle(llm)
    return outputs


def without_floats(choice: Choice) -> dict[str, Any]:  # Any: values of every type
    plain: dict[str, Any] = dict(choice)  # as above
    logprobs = plain.pop("logprobs")
    plain["logprob_ids"] = logprobs and [(e["token_id"], list(e["top"])) for e in logprobs]
    return plain


def assert_same(found: Completion, wanted: Completion) -> None:
    """Compare all choices; log-probabilities to 1e-4, as batches add up in other orders."""
    for a, b in zip(found["choices"], wanted["choices"], strict=True):
        assert without_floats(a) == without_floats(b)
        for x, y in zip(a["logprobs"] or (), b["logprobs"] or (), strict=True):
            assert x["logprob"] == pytest.approx(y["logprob"], abs=1e-4)
            assert list(x["top"].values()) == pytest.approx(list(y["top"].values()), abs=1e-4)
    assert found["usage"]["completion_tokens"] == wanted["usage"]["completion_tokens"]


def open_daring(tiny: Tiny, name: str) -> CheckedLLM:
    return tiny.open_daring(**({"max_running_req": 32} | SCHEDULES[name]))


SLOW = ("from graphs, no overlap", "in chunks of 7, no overlap", "one at a time")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in SCHEDULES]
)
def test_company_and_schedule_change_nothing(
    tiny: Tiny, prompts: list[list[int]], alone: list[Completion], name: str
) -> None:
    with open_daring(tiny, name) as llm:
        params = [make_params(**fields) for fields in PARAMS.values()]
        params.append(stop_params(llm, prompts[-1]))
        for _ in range(2):  # the second time over a warm cache
            for found, wanted in zip(run(llm, prompts, params), alone, strict=True):
                assert_same(found, wanted)
        assert (llm.stats().num_retractions > 0) == name.startswith("retracted")


def test_the_requests_do_what_they_say(alone: list[Completion]) -> None:
    by_name = dict(zip([*PARAMS, "stop"], alone, strict=True))
    assert by_name["at least so many"]["finish_reason"] == "stop"
    assert len(by_name["at least so many"]["token_ids"]) == 7
    assert by_name["at least so many of a stop id"]["stop_reason"] == 90
    assert len(by_name["at least so many of a stop id"]["token_ids"]) == 4
    assert len({c["text"] for c in by_name["three choices"]["choices"]}) == 3
    assert by_name["stop"]["finish_reason"] == "stop"
    assert 0 < len(by_name["stop"]["token_ids"]) < NUM_TOKENS
    assert 17 in by_name["bias"]["token_ids"]
    assert len(set(by_name["presence and frequency"]["token_ids"])) > 15
    assert by_name["hot"]["token_ids"] != by_name["plain"]["token_ids"]


@pytest.mark.parametrize("seed", [5, -1, 2**63 + 1, 2**64 - 1])
def test_the_first_of_several_choices_is_the_only_one(tiny: Tiny, seed: int) -> None:
    fields = {"temperature": 2.0, "seed": seed}
    with tiny.open() as llm:
        (one,) = llm.generate([[5, 6, 7]], make_params(**fields))
        (three,) = llm.generate([[5, 6, 7]], make_params(n=3, **fields))
    assert three["choices"][0] == one["choices"][0]


def test_without_a_seed_engines_and_requests_differ(tiny: Tiny) -> None:
    texts = []
    for _ in range(2):
        with tiny.open() as llm:
            texts += [llm.generate([[5]], make_params(temperature=2.0))[0]["text"] for _ in "ab"]
    assert len(set(texts)) == 4


def test_parameters_of_the_caller_are_not_changed(tiny: Tiny) -> None:
    params = make_params(n=2, seed=3, temperature=1.0, logit_bias={5: 1.0}, stop=["x"])
    before = repr(params)
    with tiny.open() as llm:
        llm.generate([[5], [6, 7]], params)
    assert repr(params) == before
