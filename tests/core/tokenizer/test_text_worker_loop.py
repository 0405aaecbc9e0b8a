"""The loop of the text worker, with its inbox in the test's hands."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from minisgl.message.queues import PullQueue, PushQueue
from minisgl.message.text import StartedMsg, TokenizeMsg
from minisgl.message.types import AbortMsg, ExitMsg, ResultMsg
from minisgl.sampling_params import SamplingParams
from minisgl.workers.text import TextWorker
from tests.tiny_models import build_tokenizer

PARAMS = SamplingParams()


class Inbox(PullQueue):
    """Gives one batch of messages after the other."""

    def __init__(self, *batches: list[object]) -> None:
        self._batches = list(batches)

    def receive(self, block: bool) -> list[object]:
        assert self._batches or not block, "it would wait for ever"
        return self._batches.pop(0) if self._batches else []


class Outbox(PushQueue):
    """Tells what is sent."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    def send(self, messages: Iterable[object]) -> None:
        self._tell(" ".join(type(message).__name__ for message in messages))


@pytest.fixture
def sent() -> list[str]:
    return []


def run(sent: list[str], *batches: list[object]) -> None:
    outbox = Outbox(sent.append)
    TextWorker(build_tokenizer(), Inbox(*batches), outbox, outbox).run_forever()


def test_streams_go_on_between_two_prompts(sent: list[str]) -> None:
    prompts: list[object] = [TokenizeMsg([uid], "hello", PARAMS) for uid in (2, 3)]
    run(
        sent,
        [StartedMsg(1, PARAMS), *prompts, ExitMsg()],
        [ResultMsg([1], [70])],
        [ResultMsg([1], [71])],
    )
    assert sent == ["UserMsg", "TextMsg", "UserMsg", "TextMsg"]


def test_an_abort_does_not_overtake_its_prompt(sent: list[str]) -> None:
    run(sent, [TokenizeMsg([1], "hello", PARAMS)], [AbortMsg(1, "left"), ExitMsg()])
    assert sent == ["UserMsg", "AbortMsg"]
