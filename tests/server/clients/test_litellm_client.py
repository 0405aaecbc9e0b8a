"""LiteLLM, which many applications use in place of a client of their own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.server.server_process import ServerProcess, joined

# It would fetch a price list at import.
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm: Any = pytest.importorskip("litellm", reason="needs the group 'clients'")

pytestmark = pytest.mark.filterwarnings("ignore")  # it makes many about itself

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def asked(server: ServerProcess) -> dict[str, Any]:  # keywords of every type
    return {
        "model": "hosted_vllm/tiny",
        "api_base": f"{server.url}/v1",
        "api_key": "none",
        "messages": HELLO,
        "max_tokens": 12,
        "seed": 3,
        "num_retries": 0,
    }


def test_streamed_and_unstreamed_chats_say_the_same(asked: dict[str, Any]) -> None:
    whole = litellm.completion(**asked)
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    text = joined([c.choices[0].delta.content for c in chunks if c.choices])
    assert text == whole.choices[0].message.content != ""
    assert whole.usage.completion_tokens == 12
    assert chunks[-1].usage.completion_tokens == 12


def test_extras_of_vllm_are_passed_on(asked: dict[str, Any]) -> None:
    answer = litellm.completion(**asked, ignore_eos=True, top_k=1, min_p=0.1)
    again = litellm.completion(**asked | {"seed": 4}, ignore_eos=True, top_k=1)
    assert answer.choices[0].message.content == again.choices[0].message.content


def test_many_async_chats_at_once(asked: dict[str, Any]) -> None:
    async def everyone() -> list[Any]:
        calls = [litellm.acompletion(**asked | {"seed": seed}) for seed in range(8)]
        return list(await asyncio.gather(*calls))

    texts = [answer.choices[0].message.content for answer in asyncio.run(everyone())]
    alone = [litellm.completion(**asked | {"seed": seed}) for seed in range(8)]
    assert texts == [answer.choices[0].message.content for answer in alone]


def test_text_completions_work(asked: dict[str, Any]) -> None:
    own = {name: asked[name] for name in ("api_base", "api_key", "max_tokens", "seed")}
    answer = litellm.text_completion(model="text-completion-openai/tiny", prompt="The", **own)
    assert answer.choices[0].text


def test_errors_are_its_own_classes(asked: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**asked, temperature=9000)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**asked | {"model": "hosted_vllm/other"})
