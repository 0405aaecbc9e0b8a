from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import httpx

from minisgl_server.api.app import create_app
from minisgl_server.state import ServerState


def test_models_are_listed_and_described(http: httpx.Client, tiny_model: Path) -> None:
    cards = http.get("/v1/models").json()
    assert cards["object"] == "list"
    assert [card["id"] for card in cards["data"]] == [str(tiny_model), "tiny"]
    assert http.get("/v1/models/tiny").json() == cards["data"][1]
    assert http.get(f"/v1/models/{tiny_model}").json()["max_model_len"] == 2048


def test_the_version_is_that_of_the_distribution(http: httpx.Client) -> None:
    answer = http.get("/version").json()
    assert answer["version"] == answer["distributions"]["minisgl-server"]


def test_tokenizing_is_what_generating_does(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "héllo 🙂"}]
    tokens = http.post("/tokenize", json={"messages": messages}).json()
    body = {"messages": messages, "max_tokens": 1}
    usage = http.post("/v1/chat/completions", json=body).json()["usage"]
    assert tokens["count"] == len(tokens["tokens"]) == usage["prompt_tokens"]
    text = http.post("/detokenize", json={"tokens": tokens["tokens"]}).json()["prompt"]
    assert "héllo 🙂" in text


def test_tokens_can_be_named(http: httpx.Client) -> None:
    body = {"prompt": "The capital", "return_token_strs": True}
    assert "".join(http.post("/tokenize", json=body).json()["token_strs"]) == "The capital"


def test_the_description_has_every_body(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    names = set(re.findall(r"#/components/schemas/(\w+)", str(document)))
    assert {"ChatRequest", "CompletionRequest", "StreamOptions", "Error"} <= names
    assert names <= set(document["components"]["schemas"])


def test_the_page_loads_nothing_from_elsewhere(http: httpx.Client) -> None:
    page = http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert re.findall(r"(?:src|href)=(?!\"data:)|https?://|@import", page.text) == []


def test_the_server_is_what_the_command_does_by_default() -> None:
    run = [sys.executable, "-m", "minisgl", "--model", "m", "--host", "203.0.113.7"]
    result = subprocess.run(run, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("minisgl: --host 203.0.113.7 ")


def test_a_server_without_its_engine_says_so(idle_state: ServerState) -> None:
    idle_state.client.fail("scheduler 0 was killed by signal 9")

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(create_app(idle_state))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            body = {"prompt": "a"}
            asked = [await http.post(path, json=body) for path in ("/v1/completions", "/tokenize")]
            return [await http.get("/health"), await http.post("/flush_cache"), *asked]

    for response in asyncio.run(ask()):
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (503, "engine_unavailable")
        assert "was killed by signal 9" in error["message"]
