"""LangChain's package for servers with OpenAI's API."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.server.server_process import ServerProcess

langchain: Any = pytest.importorskip("langchain_openai", reason="needs the group 'clients'")


@pytest.fixture
def chat(server: ServerProcess) -> Any:  # of a library that may be missing
    return langchain.ChatOpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        model="tiny",
        max_tokens=12,
        seed=3,
        max_retries=0,
        stream_usage=True,
    )


def test_streamed_and_unstreamed_chats_say_the_same(chat: Any) -> None:
    whole = chat.invoke([("system", "Be brief."), ("user", "Hello")])
    chunks = list(chat.stream([("system", "Be brief."), ("user", "Hello")]))
    assert "".join(chunk.content for chunk in chunks) == whole.content != ""
    usages = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert usages[-1]["output_tokens"] == whole.usage_metadata["output_tokens"]
    assert whole.response_metadata["finish_reason"] in ("stop", "length")


def test_batches_run_together(chat: Any) -> None:
    questions = [f"number {i}" for i in range(8)]
    assert [a.content for a in chat.batch(questions)] == [chat.invoke(q).content for q in questions]


def test_async_streams_work(chat: Any) -> None:
    async def one() -> str:
        return "".join([chunk.content async for chunk in chat.astream("Hello")])

    assert asyncio.run(one()) == chat.invoke("Hello").content


def test_plain_completions_work(server: ServerProcess) -> None:
    llm = langchain.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", model="tiny", max_tokens=8, max_retries=0
    )
    assert len(llm.generate(["a", "b"]).generations) == 2
