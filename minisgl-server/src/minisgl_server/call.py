"""What one HTTP request waits for: the pieces of all of its sequences."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from minisgl.message.text import FinishedText, TextLogprob


class Piece(NamedTuple):
    """Something new of one sequence.

    Attributes:
        number: Of the sequence within the request.
        text: New text, maybe none.
        logprob: Of the token behind it.
        end: The terminal result; then nothing more comes of this sequence.
        prompt_logprobs: Of the next prompt tokens, where they were asked for.
    """

    number: int
    text: str = ""
    logprob: TextLogprob | None = None
    end: FinishedText | None = None
    prompt_logprobs: Sequence[TextLogprob] = ()


class Call:
    """The sequences of one request; filled by the engine client, emptied by one reader.

    Attributes:
        uids: Of its sequences, in order.
        start_s: When it was submitted, by ``time.monotonic``.
        is_left: Whether its reader has gone; what still comes is dropped.
        is_aborted: Whether the workers were told to stop it; set by the client.
    """

    def __init__(
        self, uids: list[int], start_s: float, on_leave: Callable[[Call, str], object]
    ) -> None:
        """Wait for sequences.

        Args:
            uids: Of the sequences.
            start_s: Now.
            on_leave: Aborts what has not ended; takes the reason.
        """
        self.uids = uids
        self.start_s = start_s
        self.is_left = False
        self.is_aborted = False
        self._num_open = len(uids)
        self._pieces: list[Piece] = []
        self._waiter: asyncio.Future[None] | None = None
        self._on_leave = on_leave

    @property
    def is_ended(self) -> bool:
        """Whether every sequence has its terminal result; pieces may still wait to be read."""
        return self._num_open == 0

    def put(self, piece: Piece) -> None:
        """Add a piece and wake the reader."""
        if piece.end is not None:
            self._num_open -= 1
        if self.is_left:
            return
        self._pieces.append(piece)
        self.wake()

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be read."""
        return not self._pieces and (self.is_ended or self.is_left)

    async def next(self) -> list[Piece]:
        """Wait until there is something, and return all of it; empty at the end, and when woken."""
        if not self._pieces and not self.is_over:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        pieces, self._pieces = self._pieces, []
        return pieces

    def wake(self) -> None:
        """Let the reader go on, although there may be nothing for it."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def leave(self, reason: str) -> None:
        """Stop whatever still runs; safe to call at any time, and more than once."""
        if self.is_left:
            return
        self.is_left = True
        self._pieces = []
        self.wake()
        if not self.is_ended:
            self._on_leave(self, reason)
