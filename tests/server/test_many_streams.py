from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from tests.server.idle import becomes_idle
from tests.server.server_process import ServerProcess

NUM_STREAMS = 200


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["tiny", "demo"])
def test_two_hundred_streams_equal_their_single_runs(
    name: str, tiny_model: Path, tmp_path: Path
) -> None:
    prompts = [f"{'shared ' * 5}number {i}: " for i in range(NUM_STREAMS)]
    # In float32, so that the order of sums in a batch decides no token.
    flags = ("--max-running-requests=200", "--dtype=float32")
    with ServerProcess(tiny_model if name == "tiny" else "demo", tmp_path, *flags) as server:
        server.wait_until_ready()
        with server.client(timeout=3000) as http:
            alone = [
                http.post("/v1/completions", json=body_of(p)).json()["choices"][0]["text"]
                for p in prompts
            ]
            together = asyncio.run(stream_all(server.url, prompts))
            assert together == alone
            assert becomes_idle(http)
        assert "Traceback" not in server.log
        assert server.end() == 0
        assert server.leftovers() == []


def body_of(prompt: str) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}


async def stream_all(url: str, prompts: list[str]) -> list[str]:
    limits = httpx.Limits(max_connections=NUM_STREAMS)
    async with httpx.AsyncClient(base_url=url, timeout=3000, limits=limits) as http:
        return list(await asyncio.gather(*(stream_one(http, prompt) for prompt in prompts)))


async def stream_one(http: httpx.AsyncClient, prompt: str) -> str:
    text, body = "", body_of(prompt) | {"stream": True}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    return text
