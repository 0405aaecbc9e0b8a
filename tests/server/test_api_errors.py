from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.types import Message

from minisgl_server.api import requests
from minisgl_server.api.errors import ApiError

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:  # JSON
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]  # JSON
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", 0),
        ("min_p", 2),
        ("n", 0),
        ("n", 5),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("seed", 2**70),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-300),
        ("repetition_penalty", 1e-38),
        ("logit_bias", {"no": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"9999999999": 1}),
        ("logit_bias", {"5000": 1}),
        ("stop", ""),
        ("stop", ["a"] * 65),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [5000]),
        ("stop", 5),
        ("logprobs", 21),
        ("prompt", []),
        ("prompt", ""),
        ("prompt", [""]),
        ("prompt", 5),
        ("prompt", ["a"] * 9),
        ("prompt", [319, 100000]),
        ("prompt", [2**40]),
        ("prompt", [5000]),
        ("prompt", [-1]),
        ("prompt", [1.5]),
        ("prompt", [[1], [-1]]),
        ("priority", 2**40),
        ("stream_options", {"include_usage": True}),
        ("nonsense", 1),
        ("suffix", "x"),
        ("best_of", 2),
        ("response_format", {"type": "json_object"}),
    ],
)
def test_a_wrong_value_is_a_400_that_names_it(http: httpx.Client, name: str, value: Any) -> None:
    response = http.post(COMPLETE, json={"prompt": "a", "max_tokens": 2} | {name: value})
    error = error_of(response)
    assert error["param"] == name
    assert error["message"].startswith(name)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"n": 0}, "n 0: must be an integer from 1 to 4"),
        ({"n": 5}, "n 5: must be an integer from 1 to 4"),
        ({"n": 1.5}, "n 1.5: must be a valid integer"),
        ({"stream": "yes"}, 'stream "yes": must be a valid boolean'),
        ({"seed": 2**64}, f"seed {2**64}: must be less than or equal to {2**64 - 1}"),
        ({"stop_token_ids": [5, -1]}, "stop_token_ids[1] -1: must be greater than or equal to 0"),
        ({"stop_token_ids": [5, 5000]}, "stop_token_ids[1] 5000: must be from 0 to 319"),
        ({"logit_bias": {"5": "x"}}, 'logit_bias.5 "x": must be a valid number'),
        ({"logit_bias": [5]}, "logit_bias [5]: must be a JSON object"),
        ({"model": ["m" * 99]}, f'model ["{"m" * 58}…: must be a valid string'),
        ({"stream_options": {"x": 1}}, "stream_options.x: is not a parameter of this endpoint"),
        ({"stream_options": []}, "stream_options []: must be a JSON object"),
        ({"stop": ["a"] * 65}, "stop: 65 strings, may be at most 64"),
        ({"prompt": ["a"] * 9}, "prompt: 9 prompts, may be at most 8 (--max-prompts)"),
    ],
)
def test_the_value_and_what_is_allowed_are_told(
    http: httpx.Client, body: dict[str, Any], message: str
) -> None:
    error = error_of(http.post(COMPLETE, json={"prompt": "a"} | body))
    assert (error["message"], error["param"]) == (message, next(iter(body)))


@pytest.mark.parametrize("prompt", [[-1], [1.5], [[1.5]], [1, "a"], {"text": "a"}, 5])
def test_a_prompt_of_no_kind_is_told_what_kinds_there_are(http: httpx.Client, prompt: Any) -> None:
    message = error_of(http.post(COMPLETE, json={"prompt": prompt}))["message"]
    assert "a list of token ids (integers from 0 to 2147483647)" in message


def test_echo_and_detokenize_name_what_is_no_token(http: httpx.Client) -> None:
    echoed = error_of(http.post(COMPLETE, json={"prompt": [5000], "echo": True}))
    assert (echoed["param"], echoed["message"][:20]) == ("prompt", "prompt: token id 500")
    error = error_of(http.post("/detokenize", json={"tokens": [5000]}))
    assert (error["param"], error["message"][:20]) == ("tokens", "tokens: token id 500")


@pytest.mark.parametrize("number", [21, -1])
@pytest.mark.parametrize("is_wanted", [True, False])
def test_top_logprobs_is_named_and_not_what_it_becomes(
    http: httpx.Client, number: int, is_wanted: bool
) -> None:
    body = {"messages": HELLO, "logprobs": is_wanted, "top_logprobs": number}
    error = error_of(http.post(CHAT, json=body))
    assert error["param"] == "top_logprobs"
    assert error["message"] == f"top_logprobs {number}: must be an integer from 0 to 20"


@pytest.mark.parametrize("name", ["messages", "conversations", "self", "tokenizer_kwargs"])
def test_template_variables_that_are_taken_are_refused_by_name(
    http: httpx.Client, name: str
) -> None:
    error = error_of(http.post(CHAT, json={"messages": HELLO, "chat_template_kwargs": {name: []}}))
    assert error["param"] == "chat_template_kwargs"
    assert error["message"] == f"chat_template_kwargs: {name!r} is not for the template"


def test_the_best_of_one_changes_nothing(http: httpx.Client) -> None:
    body = {"prompt": "a", "max_tokens": 2, "best_of": 1}
    assert http.post(COMPLETE, json=body).status_code == 200


@pytest.mark.parametrize("name", ["tools", "functions"])
def test_tools_are_refused_and_not_ignored(http: httpx.Client, name: str) -> None:
    body = {"messages": HELLO, name: [{"type": "function", "function": {"name": "f"}}]}
    assert error_of(http.post(CHAT, json=body))["param"] == name


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        [{"content": "no role"}],
        ["text"],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_wrong_messages_are_a_400(http: httpx.Client, messages: Any, is_stream: bool) -> None:
    response = http.post(CHAT, json={"messages": messages, "stream": is_stream})
    assert error_of(response)["param"] == "messages"


@pytest.mark.parametrize("part", [{"type": "text"}, {"type": "text", "text": 5}])
def test_a_text_part_without_text_is_told_so(http: httpx.Client, part: Any) -> None:
    messages = [{"role": "user", "content": [part]}]
    message = error_of(http.post(CHAT, json={"messages": messages}))["message"]
    assert message == "messages[0].content[0]: a part of type 'text' needs a string, its text"


@pytest.mark.parametrize("length", [60_000, 200_000])
@pytest.mark.parametrize("more", [{}, {"echo": True, "logprobs": 1}, {"stream": True}])
def test_a_long_text_is_a_400_with_the_limit(
    http: httpx.Client, length: int, more: dict[str, Any]
) -> None:
    error = error_of(http.post(COMPLETE, json={"prompt": "a" * length} | more))
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert "prompt and output together may have 2048" in error["message"]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("length", [2048, 2049, 20480])
def test_a_long_prompt_is_a_400_with_the_numbers(
    http: httpx.Client, length: int, is_stream: bool
) -> None:
    response = http.post(COMPLETE, json={"prompt": [5] * length, "stream": is_stream})
    error = error_of(response)
    assert error["code"] == "context_length_exceeded"
    assert str(length) in error["message"]
    assert "2048" in error["message"]


def test_the_longest_prompt_gives_one_token(http: httpx.Client) -> None:
    body = {"prompt": [5] * 2047, "max_tokens": 100, "ignore_eos": True}
    answer = http.post(COMPLETE, json=body).json()
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"\xff\xfe", b'"text"', b"[" * 100_000, b'{"prompt": NaN}', b"null"],
    ids=range(8),
)
def test_a_malformed_body_is_a_400(http: httpx.Client, body: bytes) -> None:
    error_of(http.post(COMPLETE, content=body))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-le", "utf-32"])
@pytest.mark.parametrize("route", [COMPLETE, "/tokenize", "/generate"])
@pytest.mark.parametrize("character", ["\ud800", r"\ud800"], ids=["as bytes", "escaped"])
def test_half_a_character_is_a_400(
    http: httpx.Client, route: str, character: str, encoding: str
) -> None:
    body = f'{{"prompt": "{character}"}}'.encode(encoding, "surrogatepass")
    assert error_of(http.post(route, content=body))["code"] == "invalid_json"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_a_whole_pair_is_a_character_in_any_encoding(http: httpx.Client, encoding: str) -> None:
    body = r'{"prompt": "\ud83d\ude42"}'.encode(encoding)
    tokens = http.post("/tokenize", json={"prompt": "🙂"}).json()["tokens"]
    assert http.post("/tokenize", content=body).json()["tokens"] == tokens


def test_a_body_over_the_limit_is_a_413(http: httpx.Client) -> None:
    error_of(http.post(COMPLETE, json={"prompt": "a" * 300_000}), 413)
    chunks = (b'{"prompt": "' if i == 0 else b"a" * 10_000 for i in range(40))
    error_of(http.post(COMPLETE, content=chunks), 413)


def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "BODY_TIMEOUT_S", 0.05)

    async def receive() -> Message:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    request = Request({"type": "http", "headers": [], "method": "POST"}, receive)
    with pytest.raises(ApiError, match="did not arrive") as caught:
        asyncio.run(requests.read_body(request, 1000))
    assert caught.value.status == 408


def test_another_model_is_a_404(http: httpx.Client) -> None:
    error = error_of(http.post(CHAT, json={"messages": HELLO, "model": "gpt-9"}), 404)
    assert error["code"] == "model_not_found"
    error_of(http.get("/v1/models/gpt-9"), 404)


def test_unknown_routes_and_methods_have_the_same_form(http: httpx.Client) -> None:
    error_of(http.get("/v1/nothing"), 404)
    error_of(http.get(CHAT), 405)


@pytest.mark.parametrize("value", [0.0001, 1e-9])
def test_tiny_temperatures_work(http: httpx.Client, value: float) -> None:
    body = {"prompt": "a", "temperature": value, "top_p": 1e-6, "max_tokens": 3}
    assert http.post(COMPLETE, json=body).status_code == 200


def test_odd_request_ids_do_no_harm(http: httpx.Client) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    for given in ("", "x" * 5000, "twice", "twice"):
        response = http.post(COMPLETE, json=body, headers={"X-Request-Id": given})
        assert response.status_code == 200
        is_sane = 0 < len(given) <= 128
        assert (response.headers["x-request-id"] == given) is is_sane


def test_no_page_of_elsewhere_may_use_it_unless_told(http: httpx.Client) -> None:
    answer = http.get("/v1/models", headers={"Origin": "https://page.example"})
    assert [name for name in answer.headers if name.startswith("access-control")] == []


def test_the_server_still_works_after_all_this(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    assert http.post(COMPLETE, json={"prompt": "a", "max_tokens": 1}).status_code == 200
