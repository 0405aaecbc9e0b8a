"""Stage 3, serving: start it, stream from it, and ask it eight things at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from minisgl import LLM, SamplingParams
from tests.server.server_process import ServerProcess, events
from tests.tiny_models import TinyModel, save_tiny_model

NUM_REQS, NUM_TOKENS = 8, 24
PROMPTS = [f"{'The capital ' * i}of France is" for i in range(1, NUM_REQS + 1)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stage_3") / "model"
    save_tiny_model(folder, TinyModel("qwen3", vocab_size=320))
    return folder


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(model, tmp_path_factory.mktemp("server"), "--num-pages=256") as server:
        yield server.wait_until_ready()


@pytest.fixture(scope="module")
def offline(model: Path) -> list[str]:
    """The texts of the same engine without a server."""
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(model), num_page_override=256) as llm:
        return [output["text"] for output in llm.generate(PROMPTS, params)]


def streamed(server: ServerProcess, prompt: str) -> list[str]:
    """The pieces of a streamed completion."""
    body = {
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    with server.client() as http:
        *chunks, done = events(http.post("/v1/completions", json=body).text)
    assert done == "[DONE]"
    return [json.loads(chunk)["choices"][0]["text"] for chunk in chunks]


def test_a_stream_brings_the_text_in_pieces(server: ServerProcess, offline: list[str]) -> None:
    pieces = streamed(server, PROMPTS[0])
    assert "".join(pieces) == offline[0]
    assert len(pieces) > 1  # a busy machine may bring several tokens in one


def test_eight_requests_at_once_get_what_each_gets_alone(
    server: ServerProcess, offline: list[str]
) -> None:
    with ThreadPoolExecutor(NUM_REQS) as pool:
        together = list(pool.map(lambda prompt: "".join(streamed(server, prompt)), PROMPTS))
    assert together == offline


def test_it_ends_in_order(server: ServerProcess) -> None:
    with httpx.Client(base_url=server.url) as http:
        assert http.get("/health").json() == {"status": "ok"}
    assert server.end() == 0
    assert server.leftovers() == []
