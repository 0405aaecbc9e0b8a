from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from tests.server.server_process import ServerProcess

NUM_STREAMS = 200


@pytest.mark.slow
def test_two_hundred_streams_equal_their_single_runs(tiny_model: Path, tmp_path: Path) -> None:
    prompts = [f"{'shared ' * 5}number {i}: " for i in range(NUM_STREAMS)]
    with ServerProcess(tiny_model, tmp_path, "--max-running-requests=200") as server:
        server.wait_until_ready()
        with server.client() as http:
            alone = [
                http.post("/v1/completions", json=body_of(p)).json()["choices"][0]["text"]
                for p in prompts
            ]
        together = asyncio.run(stream_all(server.url, prompts))
        assert together == alone
        assert server.end() == 0


def body_of(prompt: str) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}


async def stream_all(url: str, prompts: list[str]) -> list[str]:
    limits = httpx.Limits(max_connections=NUM_STREAMS)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http:
        return list(await asyncio.gather(*(stream_one(http, prompt) for prompt in prompts)))


async def stream_one(http: httpx.AsyncClient, prompt: str) -> str:
    text, body = "", body_of(prompt) | {"stream": True}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    return text
