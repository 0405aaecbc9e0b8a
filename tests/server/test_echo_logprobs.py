"""``echo`` with ``logprobs``: how likely a prompt is, as evaluation harnesses ask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.server.answers import complete, stream

Json = dict[str, Any]  # JSON

PROMPT = "The capital of France 🙂 is"
ASK: Json = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}


@pytest.fixture(scope="module")
def hf_model(tiny_model: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tiny_model)
    return model


def ids_of(http: httpx.Client, prompt: str) -> list[int]:
    ids: list[int] = http.post("/tokenize", json={"prompt": prompt}).json()["tokens"]
    return ids


@torch.inference_mode()
def test_prompt_tokens_have_the_models_logprobs(
    http: httpx.Client, hf_model: PreTrainedModel
) -> None:
    ids = ids_of(http, PROMPT)
    logprobs = complete(http, prompt=ids, **ASK)["choices"][0]["logprobs"]
    expected = hf_model(torch.tensor([ids])).logits[0].log_softmax(-1)
    wanted = [float(expected[i, token]) for i, token in enumerate(ids[1:])]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:-1] == pytest.approx(wanted, abs=1e-4)
    assert len(logprobs["token_logprobs"]) == len(ids) + 1
    likeliest = [max(top.values()) for top in logprobs["top_logprobs"][1:-1]]
    assert likeliest == pytest.approx(expected[:-1].max(-1).values.tolist(), abs=1e-4)


def test_offsets_say_where_in_the_text_each_token_is(http: httpx.Client) -> None:
    choice = complete(http, prompt=PROMPT, **ASK | {"max_tokens": 6})["choices"][0]
    logprobs, text = choice["logprobs"], choice["text"]
    assert text.startswith(PROMPT)
    whole = [
        (token, offset)
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True)
        if "\ufffd" not in token  # a part of a character
    ]
    assert len(whole) > 5
    assert all(text[offset:].startswith(token) for token, offset in whole)


@pytest.mark.parametrize("is_list", [False, True])
def test_a_prompt_can_be_scored_and_nothing_else(http: httpx.Client, is_list: bool) -> None:
    body = ASK | {"max_tokens": 0, "logprobs": 2, "prompt": [PROMPT] * 2 if is_list else PROMPT}
    for _ in range(2):  # the second time the prefix cache has it
        answer = complete(http, **body)
        for choice in answer["choices"]:
            assert choice["text"] == PROMPT
            assert choice["finish_reason"] == "length"
            assert len(choice["logprobs"]["tokens"]) == len(ids_of(http, PROMPT))
        assert answer["usage"]["completion_tokens"] == 0
    assert len(answer["choices"]) == (2 if is_list else 1)


def test_an_echo_alone_needs_no_logprobs(http: httpx.Client) -> None:
    choice = complete(http, prompt=PROMPT, echo=True, max_tokens=0)["choices"][0]
    assert (choice["text"], choice["logprobs"]) == (PROMPT, None)


def test_streamed_and_unstreamed_scores_are_the_same(http: httpx.Client) -> None:
    body = ASK | {"prompt": [PROMPT, "a b c"], "max_tokens": 5, "n": 2, "ignore_eos": True}
    together: list[Json] = [{"text": "", "logprobs": []} for _ in range(4)]
    for chunk in stream(http, "/v1/completions", **body):
        (choice,) = chunk["choices"]
        together[choice["index"]]["text"] += choice["text"]
        if choice["logprobs"]:
            together[choice["index"]]["logprobs"].append(choice["logprobs"])
    for choice, parts in zip(complete(http, **body)["choices"], together, strict=True):
        assert parts["text"] == choice["text"]
        for name, column in choice["logprobs"].items():
            streamed = [entry for part in parts["logprobs"] for entry in part[name]]
            if name in ("tokens", "text_offset"):
                assert streamed == column
            else:
                assert len(streamed) == len(column)


def test_nothing_to_generate_needs_an_echo(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 0, "logprobs": 1})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")
    response = http.post("/generate", json={"prompt": "a", "max_tokens": 0})
    assert response.status_code == 400
