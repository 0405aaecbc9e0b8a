from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from minisgl.message.folder import SocketFolder
from minisgl.message.queues import PullQueue, PushQueue
from minisgl.message.types import AbortMsg, ExitMsg
from minisgl.message.wire import wire_codec

CODEC = wire_codec()


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()  # Any: its sockets are of a private type
    yield context
    context.destroy(linger=0)


@pytest.fixture
def ends(context: zmq.Context[Any], path: Path) -> Iterator[tuple[PullQueue, PushQueue]]:
    inbox, outbox = PullQueue(context, path, CODEC), PushQueue(context, path, CODEC)
    yield inbox, outbox
    inbox.close()
    outbox.close()


@pytest.fixture
def path() -> Iterator[Path]:
    with SocketFolder() as folder:
        yield folder.path / "inbox"


def test_messages_arrive_in_order(ends: tuple[PullQueue, PushQueue]) -> None:
    inbox, outbox = ends
    for number in range(100):
        outbox.send([AbortMsg(2 * number), AbortMsg(2 * number + 1)])
    got: list[Any] = []  # messages
    while len(got) < 200:
        got += inbox.receive(block=True)
    assert [message.uid for message in got] == list(range(200))


def test_receiving_does_not_wait_unless_told(ends: tuple[PullQueue, PushQueue]) -> None:
    assert ends[0].receive(block=False) == []


def test_blocking_ends_when_something_comes(ends: tuple[PullQueue, PushQueue]) -> None:
    inbox, outbox = ends
    timer = threading.Timer(0.1, outbox.send, [[ExitMsg()]])
    timer.start()
    assert inbox.receive(block=True) == [ExitMsg()]
    timer.join()


def test_a_sender_may_come_first_and_never_waits(context: zmq.Context[Any], path: Path) -> None:
    outbox = PushQueue(context, path, CODEC)
    for number in range(5000):
        outbox.send([AbortMsg(number)])
    inbox = PullQueue(context, path, CODEC)
    got: list[Any] = []  # messages
    while len(got) < 5000:
        got += inbox.receive(block=True)
    assert got[-1] == AbortMsg(4999)
    inbox.close()
    outbox.close()


def test_a_malformed_frame_is_reported_and_harms_nobody(
    ends: tuple[PullQueue, PushQueue],
    context: zmq.Context[Any],
    path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    inbox, outbox = ends
    with context.socket(zmq.PUSH) as intruder:
        intruder.connect(f"ipc://{path}")
        intruder.send(b"\x80\x04garbage")
    with caplog.at_level(logging.ERROR):
        assert inbox.receive(block=True) == []
    assert "a frame was dropped" in caplog.text
    outbox.send([ExitMsg()])
    assert inbox.receive(block=True) == [ExitMsg()]
