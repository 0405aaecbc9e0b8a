"""A call as server-sent events, whatever they look like."""

from __future__ import annotations

import asyncio
import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minisgl_server.api.errors import ApiError
from minisgl_server.call import Call, Piece
from minisgl_server.state import ServerState

DONE = b"data: [DONE]\n\n"
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_KEEP_ALIVE = b": still here\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class CallStream(Response, ABC):
    """Sends what `events_of` makes of the pieces of a call, as they come.

    The status line waits for the first piece, so that a refusal still gets its own status; after
    ``keep_alive_s`` it is sent anyway, and what goes wrong from then on is an event.
    """

    def __init__(self, state: ServerState, call: Call, answer_id: str) -> None:
        """Stream ``call``; whoever made it hands it over.

        Args:
            state: Of the server.
            call: What was submitted.
            answer_id: Under which it can be aborted.
        """
        super().__init__()
        self._state = state
        self._call = call
        self._answer_id = answer_id
        self._is_started = False
        self._heard_s = 0.0  # when the newest pieces came, by the loop's clock
        self._timer: asyncio.TimerHandle

    @abstractmethod
    def events_of(self, pieces: list[Piece]) -> bytes:
        """Write events of new pieces; may be nothing.

        Raises:
            ApiError: A sequence was refused, failed or was aborted.
        """

    @abstractmethod
    def closing(self) -> bytes | None:
        """Write the last events, or return ``None`` when there are sequences without an end."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; a client that leaves aborts the call."""
        try:
            async with answering(self._state, self._call, self._answer_id, receive):
                with self._waking():
                    await self._run(send)
        except ApiError as error:
            if not self._is_started:
                raise
            await _send(send, event(error.body()), is_last=True)

    async def _run(self, send: Send) -> None:
        while pieces := await self._next(send):
            body = self.events_of(pieces)
            if body:
                await self._start(send)
                await _send(send, body)
        last = self.closing()
        if last is None:
            return  # the client has gone
        await self._start(send)
        await _send(send, last, is_last=True)

    async def _next(self, send: Send) -> list[Piece]:
        """Wait for pieces, with a sign of life whenever woken without any."""
        while not (pieces := await self._call.next()) and not self._call.is_over:
            await self._start(send)
            await _send(send, _KEEP_ALIVE)
        self._heard_s = asyncio.get_running_loop().time()
        return pieces

    @contextmanager
    def _waking(self) -> Iterator[None]:
        """Wake who waits for pieces after each while without any.

        One timer for all of the stream: a time limit for each wait costs more than an event.
        """
        self._heard_s = asyncio.get_running_loop().time()
        self._watch()
        try:
            yield
        finally:
            self._timer.cancel()

    def _watch(self) -> None:
        loop, pause_s = asyncio.get_running_loop(), self._state.settings.keep_alive_s
        now_s = loop.time()
        if now_s >= self._heard_s + pause_s:
            self._call.wake()
            self._heard_s = now_s
        self._timer = loop.call_at(self._heard_s + pause_s, self._watch)

    async def _start(self, send: Send) -> None:
        if not self._is_started:
            self._is_started = True
            headers = [*self.raw_headers, *_HEADERS]
            headers = [(name, value) for name, value in headers if name != b"content-length"]
            await send({"type": "http.response.start", "status": 200, "headers": headers})


@asynccontextmanager
async def answering(
    state: ServerState, call: Call, answer_id: str, receive: Receive
) -> AsyncIterator[None]:
    """List a call under its id while it is read; abort it when its reader goes or fails."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        call.leave("the client left")

    watcher = asyncio.create_task(watch())
    state.calls[answer_id] = call
    try:
        yield
    finally:
        del state.calls[answer_id]
        watcher.cancel()
        call.leave("the answer has ended")


def new_id(prefix: str) -> str:
    """Make the id of an answer; ours, whatever the client sends."""
    return f"{prefix}-{secrets.token_hex(16)}"


def event(content: dict[str, Any]) -> bytes:  # JSON
    """Write one server-sent event."""
    return f"data: {_encode(content)}\n\n".encode()


async def _send(send: Send, body: bytes, is_last: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not is_last})
