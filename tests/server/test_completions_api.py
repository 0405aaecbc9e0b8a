from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.server.answers import HELLO, chat, complete, stream
from tests.server.server_process import events

Json = dict[str, Any]  # JSON

GREEDY: Json = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


def test_a_chat_has_openais_shape(http: httpx.Client) -> None:
    answer = chat(http, **GREEDY)
    choice = answer["choices"][0]
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 8


def test_a_completion_has_openais_shape(http: httpx.Client) -> None:
    answer = complete(http, **GREEDY)
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert isinstance(answer["choices"][0]["text"], str)
    assert answer["choices"][0]["index"] == 0


def test_not_asking_for_a_stream_gives_json(http: httpx.Client) -> None:
    for extra in ({}, {"stream": False}, {"stream": None}):
        response = http.post("/v1/chat/completions", json={"messages": HELLO, **GREEDY, **extra})
        assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize("seed", range(4))
def test_streamed_and_unstreamed_chats_say_the_same(http: httpx.Client, seed: int) -> None:
    # A random model at a high temperature emits parts of characters all the time.
    body = {"messages": HELLO, "max_tokens": 60, "temperature": 2.0, "seed": seed}
    chunks = stream(http, "/v1/chat/completions", **body)
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
    assert text == chat(http, **body)["choices"][0]["message"]["content"]


def test_the_role_comes_first_and_no_delta_is_empty(http: httpx.Client) -> None:
    body = {"messages": HELLO, "stop": ["zzzz"], "seed": 3, "max_tokens": 40}
    first, *middle, last = stream(http, "/v1/chat/completions", **body)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(chunk["choices"][0]["delta"]["content"] for chunk in middle)
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] in ("stop", "length")
    assert {chunk["object"] for chunk in (first, *middle, last)} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in (first, *middle, last)}) == 1


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
def test_usage_is_not_streamed_unless_asked_for(http: httpx.Client, options: Json | None) -> None:
    chunks = stream(http, "/v1/completions", prompt="a", stream_options=options, **GREEDY)
    assert all("usage" not in chunk for chunk in chunks)


def test_usage_is_the_last_chunk_and_has_no_choices(http: httpx.Client) -> None:
    options = {"include_usage": True}
    *chunks, last = stream(http, "/v1/completions", prompt="a", stream_options=options, **GREEDY)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 8


def test_cached_tokens_are_counted_at_the_second_time(http: httpx.Client) -> None:
    prompt = "count me twice " * 20
    for _ in range(2):
        answer = complete(http, prompt=prompt, **GREEDY)
    details = answer["usage"]["prompt_tokens_details"]
    assert 0 < details["cached_tokens"] < answer["usage"]["prompt_tokens"]


def test_several_prompts_have_several_choices_in_order(http: httpx.Client) -> None:
    prompts = ["The capital", "def fib", "1 2 3"]
    together = complete(http, prompt=prompts, **GREEDY)["choices"]
    alone = [complete(http, prompt=p, **GREEDY)["choices"][0]["text"] for p in prompts]
    assert [choice["index"] for choice in together] == [0, 1, 2]
    assert [choice["text"] for choice in together] == alone


def test_choices_differ_and_repeat_with_a_seed(http: httpx.Client) -> None:
    body = {"n": 3, "temperature": 1.5, "seed": 7, "max_tokens": 12}
    first, second = (complete(http, **body) for _ in range(2))
    texts = [choice["text"] for choice in first["choices"]]
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts == [choice["text"] for choice in second["choices"]]
    assert first["usage"]["prompt_tokens"] == complete(http)["usage"]["prompt_tokens"]


def test_streamed_choices_are_the_unstreamed_ones(http: httpx.Client) -> None:
    body: Json = {"prompt": ["a", "b"], "n": 2, "seed": 5, "max_tokens": 10}
    texts = {0: "", 1: "", 2: "", 3: ""}
    for chunk in stream(http, "/v1/completions", **body):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    choices = complete(http, **body)["choices"]
    assert list(texts.values()) == [choice["text"] for choice in choices]


def test_token_ids_are_a_prompt(http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"prompt": "The capital"}).json()["tokens"]
    by_ids = complete(http, prompt=ids, **GREEDY)
    lists = complete(http, prompt=[ids, ids], **GREEDY)
    text = complete(http, **GREEDY)["choices"][0]["text"]
    assert [choice["text"] for choice in lists["choices"]] == [text, text]
    assert by_ids["choices"][0]["text"] == text


def test_a_stop_string_ends_the_text_before_it(http: httpx.Client) -> None:
    whole = complete(http, **GREEDY | {"max_tokens": 30})["choices"][0]["text"]
    stop = whole[8:10]
    cut = complete(http, stop=[stop, "nowhere"], **GREEDY | {"max_tokens": 30})
    assert cut["choices"][0]["text"] == whole[: whole.index(stop)]
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["choices"][0]["stop_reason"] == stop
    assert cut["usage"]["completion_tokens"] < 30


def test_echo_puts_the_prompt_first(http: httpx.Client) -> None:
    plain = complete(http, **GREEDY)["choices"][0]["text"]
    assert complete(http, echo=True, **GREEDY)["choices"][0]["text"] == "The capital" + plain
    chunks = stream(http, "/v1/completions", prompt="The capital", echo=True, **GREEDY)
    assert "".join(c["choices"][0]["text"] for c in chunks) == "The capital" + plain


@pytest.mark.parametrize("is_stream", [False, True])
def test_chat_logprobs_have_one_entry_per_token(http: httpx.Client, is_stream: bool) -> None:
    body: Json = {"messages": HELLO, "logprobs": True, "top_logprobs": 3, **GREEDY}
    if is_stream:
        chunks = stream(http, "/v1/chat/completions", **body)
        logprobs = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
        entries = [entry for each in logprobs for entry in each["content"]]
    else:
        entries = chat(http, **body)["choices"][0]["logprobs"]["content"]
    assert len(entries) == 8
    for entry in entries:
        assert len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"] <= 0
        assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"]


def test_completion_logprobs_are_parallel_lists(http: httpx.Client) -> None:
    logprobs = complete(http, logprobs=2, **GREEDY)["choices"][0]["logprobs"]
    assert [len(logprobs[name]) for name in ("tokens", "token_logprobs", "text_offset")] == [8] * 3
    assert logprobs["text_offset"][0] == 0
    assert all(len(top) <= 2 for top in logprobs["top_logprobs"])


def test_logprobs_of_filtered_tokens_are_valid_json(http: httpx.Client) -> None:
    response = http.post(
        "/v1/completions",
        json={"prompt": "a", "logprobs": 5, "top_k": 1, "logit_bias": {"50": -100}, "seed": 1},
    )
    json.loads(response.text, parse_constant=lambda name: pytest.fail(name))
    assert response.status_code == 200


def test_logit_bias_can_force_a_token(http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"prompt": "Z"}).json()["tokens"]
    answer = complete(http, logit_bias={str(ids[0]): 100}, **GREEDY)
    assert answer["choices"][0]["text"] == "Z" * 8


def test_stop_token_ids_and_min_tokens_are_honoured(http: httpx.Client) -> None:
    token = http.post("/tokenize", json={"prompt": "Z"}).json()["tokens"][0]
    body: Json = {"logit_bias": {str(token): 100}, "stop_token_ids": [token], "temperature": 0}
    answer = complete(http, **body)
    assert (answer["choices"][0]["text"], answer["choices"][0]["stop_reason"]) == ("", token)
    assert complete(http, min_tokens=5, **body)["usage"]["completion_tokens"] >= 5


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_limits_are_exact_and_huge_ones_are_clamped(http: httpx.Client, limit: str) -> None:
    one = chat(http, ignore_eos=True, **{limit: 1})
    assert one["usage"]["completion_tokens"] == 1
    whole = chat(http, ignore_eos=True, **{limit: 10**9})["usage"]
    assert whole["total_tokens"] == 2048


def test_the_newer_limit_wins(http: httpx.Client) -> None:
    answer = chat(http, max_tokens=9, max_completion_tokens=2, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 2


def test_text_parts_are_joined(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "Hello"}]
    in_parts = chat(http, messages=[{"role": "user", "content": parts}], **GREEDY)
    assert in_parts["choices"][0]["message"] == chat(http, **GREEDY)["choices"][0]["message"]


def test_parameters_without_effect_are_accepted(http: httpx.Client) -> None:
    quiet = {"user": "me", "store": False, "metadata": {"a": "b"}, "service_tier": "auto"}
    neutral = {"tools": None, "response_format": {"type": "text"}, "tool_choice": "none"}
    assert chat(http, **GREEDY, **quiet, **neutral)["choices"]


def test_generate_streams_bare_text(http: httpx.Client) -> None:
    body = {"prompt": "The capital", "max_tokens": 8, "ignore_eos": True}
    *texts, done = events(http.post("/generate", json=body).text)
    assert done == "[DONE]"
    assert "".join(texts) == complete(http, **GREEDY)["choices"][0]["text"]
