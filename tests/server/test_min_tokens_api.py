"""``min_tokens`` and stop strings, as a server's clients see them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.answers import HELLO, chat, complete, stream

Json = dict[str, Any]  # JSON

CASES = [
    (None, "Z", "", 1),
    (0, "ZZ", "", 2),
    (3, "Z", "ZZZ", 4),
    (3, "ZZ", "ZZ", 4),  # begins in text of the third token
    (3, "ZZZZZ", "", 5),
    (8, "Z", "ZZZZZZZZ", 8),
]


def body_for(http: httpx.Client, **fields: Any) -> Json:  # JSON
    """Let every token be a Z."""
    token = http.post("/tokenize", json={"prompt": "Z"}).json()["tokens"][0]
    return {"temperature": 0, "max_tokens": 8, "logit_bias": {str(token): 100}} | fields


@pytest.mark.parametrize(("min_tokens", "stop", "text", "num_tokens"), CASES)
def test_each_choice_ends_after_the_first_tokens(
    http: httpx.Client, min_tokens: int | None, stop: str, text: str, num_tokens: int
) -> None:
    answer = complete(http, **body_for(http, min_tokens=min_tokens, stop=stop, n=2))
    assert [choice["text"] for choice in answer["choices"]] == [text] * 2
    assert answer["usage"]["completion_tokens"] == 2 * num_tokens
    for choice in answer["choices"]:
        assert choice["finish_reason"] == ("stop" if num_tokens < 8 else "length")
        assert choice["stop_reason"] == (stop if num_tokens < 8 else None)


@pytest.mark.parametrize(("min_tokens", "stop", "text", "num_tokens"), CASES)
def test_streams_and_chats_end_there_too(
    http: httpx.Client, min_tokens: int | None, stop: str, text: str, num_tokens: int
) -> None:
    body = body_for(http, min_tokens=min_tokens, stop=[stop, "never"])
    assert chat(http, **body)["choices"][0]["message"]["content"] == text
    options = {"include_usage": True}
    *chunks, usage = stream(
        http, "/v1/chat/completions", messages=HELLO, stream_options=options, **body
    )
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == text
    assert chunks[-1]["choices"][0]["finish_reason"] == ("stop" if num_tokens < 8 else "length")
    assert usage["usage"]["completion_tokens"] == num_tokens


def test_a_stream_with_a_stop_token_that_is_no_token_is_a_400(http: httpx.Client) -> None:
    body = {"messages": HELLO, "stream": True, "n": 2, "stop_token_ids": [320]}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["message"] == "stop_token_ids[0] 320: must be from 0 to 319"
    assert error["param"] == "stop_token_ids"
