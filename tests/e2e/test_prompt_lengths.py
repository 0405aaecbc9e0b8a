"""Prompts at the edges: of pages, of the context, of the pool, and many of them."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl import LLM, SamplingParams
from minisgl.errors import RequestError
from tests.e2e.offline_harness import Tiny, assert_idle, greedy_params, ids_of, random_prompts
from tests.tiny_models import TinyModel


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    spec = TinyModel("llama", vocab_size=320, max_positions=200)
    return Tiny.save(tmp_path_factory.mktemp("lengths"), spec)


@pytest.mark.parametrize("is_overlap", [True, False])
@pytest.mark.parametrize("page_size", [1, 2, 4, 16, 64])
def test_a_prompt_around_a_page_boundary_can_be_sent_twice(
    tiny: Tiny, page_size: int, is_overlap: bool
) -> None:
    lengths = [k * page_size + d for k in (1, 2) for d in (-1, 0, 1) if k * page_size + d > 0]
    prompts = random_prompts(lengths)
    expected = tiny.greedy(prompts, 6)
    with tiny.open(page_size=page_size, overlap=is_overlap) as llm:
        for prompt, wanted in zip(prompts, expected, strict=True):
            first, again = (llm.generate([prompt], greedy_params(6))[0] for _ in range(2))
            assert first["token_ids"] == again["token_ids"] == wanted
            # The last token is always computed, and only whole pages are found.
            num_known = (len(prompt) - 1) // page_size * page_size
            assert again["usage"]["cached_tokens"] == num_known
        assert_idle(llm)


@pytest.mark.parametrize("num_twins", [2, 8])
@pytest.mark.parametrize("chunk", [3, 16, 33])
@pytest.mark.parametrize("page_size", [1, 4])
def test_twins_in_one_call_do_not_read_what_is_not_computed(
    tiny: Tiny, page_size: int, chunk: int, num_twins: int
) -> None:
    shared, *own = random_prompts((40, *[2] * num_twins))
    prompts = [shared + tail for tail in own] + [shared] * num_twins
    expected = tiny.greedy([*prompts[:num_twins], shared], 5)
    expected += [expected[-1]] * (num_twins - 1)
    with tiny.open(page_size=page_size, max_prefill_length=chunk, max_running_req=16) as llm:
        assert ids_of(llm.generate(prompts, greedy_params(5))) == expected
        # A twin does not wait for less than 16 shared tokens; the rest of 40 it must not compute.
        others = (2 * num_twins - 1) * (2 + 16)
        assert llm.stats().num_prefill_tokens <= 42 + others
        assert_idle(llm)


@pytest.mark.parametrize("settings", [{"max_seq_len_override": 50}, {"num_page_override": 50}])
def test_the_longest_prompt_that_is_taken_is_one_short_of_the_limit(
    tiny: Tiny, settings: dict[str, Any]
) -> None:
    below, at, above = random_prompts((49, 50, 51))
    with tiny.open(**({"page_size": 1} | settings)) as llm:
        (output,) = llm.generate([below], greedy_params(10))
        assert output["token_ids"] == tiny.greedy([below], 1)[0]
        assert output["finish_reason"] == "length"
        for prompt in (at, above, above * 10):
            with pytest.raises(RequestError, match=rf"has {len(prompt)} tokens; .* may have 50"):
                llm.generate([prompt], greedy_params(10))
            with pytest.raises(RequestError, match=r"prompt: has"):
                llm.stream(prompt, greedy_params(10))
        assert_idle(llm)


@pytest.mark.parametrize("prompt_len", [1, 30, 49])
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("max_tokens", [None, 10**9])
def test_without_a_limit_generation_ends_at_the_context(
    tiny: Tiny, prompt_len: int, page_size: int, max_tokens: int | None
) -> None:
    (prompt,) = random_prompts((prompt_len,))
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    with tiny.open(max_seq_len_override=50, page_size=page_size) as llm:
        (output,) = llm.generate([prompt], params)
        assert output["finish_reason"] == "length"
        assert output["token_ids"] == tiny.greedy([prompt], 50 - prompt_len)[0]


@pytest.mark.parametrize("page_size", [1, 5, 9, 15, 45])
@pytest.mark.parametrize("admission", ["optimistic", "reserve"])
def test_a_pool_of_45_tokens_stops_a_prompt_of_40_that_asks_for_100(
    tiny: Tiny, page_size: int, admission: str
) -> None:
    (prompt,) = random_prompts((40,))
    pool: dict[str, Any] = {"page_size": page_size, "num_page_override": 45 // page_size}
    with tiny.open(admission=admission, **pool) as llm:
        first, second = llm.generate([prompt, prompt], greedy_params(100))
        assert first["finish_reason"] == second["finish_reason"] == "length"
        assert first["token_ids"] == second["token_ids"] == tiny.greedy([prompt], 5)[0]
        assert_idle(llm)


def test_thousands_of_prompts_come_back_in_order(tiny: Tiny) -> None:
    prompts = [[5 + i % 300, 6 + i // 300, 7 + i % 7] for i in range(3000)]
    params = [greedy_params(1 + i % 3) for i in range(len(prompts))]
    with LLM(str(tiny.folder), max_running_req=128, page_size=4, num_page_override=512) as llm:
        outputs = llm.generate(prompts, params)
        assert [len(ids) for ids in ids_of(outputs)] == [1 + i % 3 for i in range(len(prompts))]
        for i in (0, 1, 299, 300, 1500, 2999):
            assert outputs[i]["token_ids"] == tiny.greedy([prompts[i]], 1 + i % 3)[0]
        assert_idle(llm)


def test_no_prompts_are_no_work(tiny: Tiny) -> None:
    with tiny.open() as llm:
        assert llm.generate([]) == []


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (["a", "b"], [greedy_params(1)] * 3, "has 3 entries for 2 prompts"),
        (["a", "b"], [], "has 0 entries for 2 prompts"),
        ([], [greedy_params(1)], "has 1 entries for 0 prompts"),
        (["a"], {"max_tokens": 3}, "must be SamplingParams, not {'max_tokens': 3}"),
        (["a"], ["max_tokens"], "must be SamplingParams, not 'max_tokens'"),
        (["a"], 7, "must be SamplingParams, not 7"),
        ([[5, 1.5]], None, r"prompts\[0\]: token id 1.5: must be an integer"),
        (["a", [5, None]], None, r"prompts\[1\]: token id None: must be an integer"),
        (["a", [5, "b"]], None, r"prompts\[1\]: token id 'b': must be an integer"),
        ([b"bytes"], None, r"prompts\[0\]: must be a text or token ids, not b'bytes'"),
        ([{"role": "user"}], None, r"prompts\[0\]: must be a text or token ids"),
        (["a", ""], None, r"prompts\[1\]: .*empty"),
        ([[-1]], None, r"token id -1: must be from 0 to 319"),
    ],
)
def test_a_bad_call_says_what_is_wrong_and_runs_nothing(
    tiny: Tiny,
    prompts: Any,  # Any: wrong types on purpose
    params: Any,  # as above
    message: str,
) -> None:
    with tiny.open() as llm:
        with pytest.raises(RequestError, match=message):
            llm.generate(prompts, params)
        assert llm.stats().num_prefill_tokens == 0
        assert len(llm.generate(["a"], greedy_params(2))[0]["token_ids"]) == 2


def test_a_bias_beyond_the_vocabulary_is_refused_and_not_ignored(tiny: Tiny) -> None:
    params = [SamplingParams(max_tokens=2, logit_bias={320: 1.0}), greedy_params(2)]
    message = "logit_bias of token id 320: must be from 0 to 319"
    with tiny.open() as llm:
        with pytest.raises(RequestError, match=message):
            llm.generate(["a", "b"], params)
        with pytest.raises(RequestError, match=message):
            llm.stream("a", params[0])
        assert len(llm.generate("b", params[1])[0]["token_ids"]) == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [("stop", 5), ("stop", (5,)), ("stop_token_ids", 5), ("logit_bias", None), ("logit_bias", [1])],
)
def test_a_value_of_another_kind_is_named(field: str, value: Any) -> None:  # Any: on purpose
    with pytest.raises(RequestError, match=field):
        SamplingParams(**{field: value})
