"""A scheduler's line to other processes."""

from __future__ import annotations

import logging

from minisgl.message.queues import PullQueue, PushQueue
from minisgl.message.text import StartedMsg
from minisgl.message.types import (
    AbortMsg,
    ExitMsg,
    FlushMsg,
    ReplyMsg,
    SchedulerMsg,
    StatsMsg,
    UserMsg,
)
from minisgl.scheduler.io import SchedulerIO

logger = logging.getLogger(__name__)


class QueueIO(SchedulerIO):
    """Requests come from a queue; results go to the detokenizer.

    Each request is announced to the detokenizer on the same queue as its tokens, so it is known
    there before they come, whichever process it came from.
    """

    def __init__(self, inbox: PullQueue, outbox: PushQueue) -> None:
        """Take both ends, which the caller closes."""
        self._inbox = inbox
        self._outbox = outbox

    def receive(self, block: bool) -> list[SchedulerMsg]:
        """Receive, and announce new requests; see `SchedulerIO.receive`."""
        messages: list[SchedulerMsg] = []
        started = []
        for message in self._inbox.receive(block):
            match message:
                case UserMsg():
                    started.append(StartedMsg(message.uid, message.sampling_params))
                case AbortMsg() | FlushMsg() | StatsMsg() | ExitMsg():
                    pass
                case _:
                    logger.error("a scheduler takes no %s", type(message).__name__)
                    continue
            messages.append(message)
        if started:
            self._outbox.send(started)
        return messages

    def send(self, replies: list[ReplyMsg]) -> None:
        """Send a step's replies in one frame."""
        self._outbox.send(replies)
