"""What a step makes known, until it is sent."""

from __future__ import annotations

from minisgl.engine.contract import TokenLogprobs
from minisgl.message.types import FinishedReq, ReplyMsg, ResultMsg
from minisgl.scheduler.io import SchedulerIO


class Outbox:
    """Collects tokens and terminal results into one message per step; see `ResultMsg`."""

    def __init__(self, io: SchedulerIO) -> None:
        """Start empty.

        Args:
            io: Where messages go.
        """
        self._io = io
        self._replies: list[ReplyMsg] = []
        self._clear()

    def add(self, reply: ReplyMsg) -> None:
        """Send ``reply`` with the next message."""
        self._replies.append(reply)

    def send(self) -> None:
        """Send what there is, if anything."""
        if self.uids or self.finished or self.prompt_logprobs:
            result = ResultMsg(
                self.uids, self.token_ids, self.finished, self.logprobs, self.prompt_logprobs
            )
            self._replies.append(result)
            self._clear()
        if self._replies:
            replies, self._replies = self._replies, []
            self._io.send(replies)

    def _clear(self) -> None:
        self.uids: list[int] = []
        self.token_ids: list[int] = []
        self.finished: list[FinishedReq] = []
        self.logprobs: dict[int, TokenLogprobs] = {}
        self.prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
