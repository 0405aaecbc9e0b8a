"""Asking a server for answers that must succeed."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.server.server_process import events

Json = dict[str, Any]  # JSON

HELLO = [{"role": "user", "content": "Hello"}]


def chat(http: httpx.Client, **body: Any) -> Json:  # JSON
    response = http.post("/v1/chat/completions", json={"messages": HELLO} | body)
    assert response.status_code == 200, response.text
    answer: Json = response.json()
    return answer


def complete(http: httpx.Client, **body: Any) -> Json:  # JSON
    response = http.post("/v1/completions", json={"prompt": "The capital"} | body)
    assert response.status_code == 200, response.text
    answer: Json = response.json()
    return answer


def stream(http: httpx.Client, path: str, **body: Any) -> list[Json]:  # JSON
    """All chunks of a stream that ends as it should."""
    response = http.post(path, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]
