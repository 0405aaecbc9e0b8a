"""The official Python client, sync and async, with its typed answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionUserMessageParam

from tests.server.idle import becomes_idle, num_aborted, wait_until
from tests.server.server_process import ServerProcess, joined

HELLO: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[-1].id


def test_a_chat_is_typed_and_complete(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=HELLO, max_tokens=5, temperature=0, extra_body={"ignore_eos": True}
    )
    assert isinstance(answer, ChatCompletion)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    ChatCompletion.model_validate(answer.model_dump(), strict=True)


def test_a_streamed_chat_is_the_same(client: openai.OpenAI, model: str) -> None:
    body = {"ignore_eos": True}
    whole = client.chat.completions.create(
        model=model, messages=HELLO, max_tokens=20, seed=1, extra_body=body
    )
    stream = client.chat.completions.create(
        model=model,
        messages=HELLO,
        max_tokens=20,
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=body,
    )
    chunks: list[ChatCompletionChunk] = list(stream)
    text = joined([c.choices[0].delta.content for c in chunks if c.choices])
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20


def test_the_stream_helper_puts_an_answer_together(
    client: openai.OpenAI, model: str, http: httpx.Client
) -> None:
    token = http.post("/tokenize", json={"prompt": "Z"}).json()["tokens"][0]
    with client.chat.completions.stream(
        model=model,
        messages=HELLO,
        max_tokens=8,
        logprobs=True,
        logit_bias={str(token): 100},
        stop="ZZZZ",
    ) as stream:
        answer = stream.get_final_completion()
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is not None


def test_completions_work_in_both_modes(client: openai.OpenAI, model: str) -> None:
    whole = client.completions.create(model=model, prompt=["a", "b"], max_tokens=6, seed=2)
    stream = client.completions.create(
        model=model, prompt=["a", "b"], max_tokens=6, seed=2, stream=True
    )
    texts = ["", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


def test_errors_are_the_clients_own_classes(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=model, messages=HELLO, temperature=9000)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=HELLO)


def test_concurrent_async_streams_equal_single_runs(
    server: ServerProcess, client: openai.OpenAI, model: str
) -> None:
    prompts = [f"number {i}: " * (i + 1) for i in range(8)]

    async def one(http: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await http.completions.create(
            model=model, prompt=prompt, max_tokens=16, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def everyone() -> list[str]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as http:
            return list(await asyncio.gather(*(one(http, prompt) for prompt in prompts)))

    alone = [
        client.completions.create(model=model, prompt=prompt, max_tokens=16, temperature=0)
        for prompt in prompts
    ]
    assert asyncio.run(everyone()) == [answer.choices[0].text for answer in alone]


def test_closing_a_stream_early_frees_it(slow_server: ServerProcess) -> None:
    url = f"{slow_server.url}/v1"
    with (
        slow_server.client() as http,
        openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client,
    ):
        before = num_aborted(http)
        stream = client.completions.create(
            model="tiny", prompt="a", max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
        assert wait_until(lambda: num_aborted(http) == before + 1)
        assert becomes_idle(http)
