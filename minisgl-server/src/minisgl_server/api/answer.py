"""Turning the pieces of a call into an answer: at once, or as server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from minisgl.message.text import FinishedText, TextLogprob
from minisgl_server.api.errors import ApiError, overloaded
from minisgl_server.api.params import from_request_error
from minisgl_server.api.shapes import Shape, usage
from minisgl_server.call import Call, Piece

logger = logging.getLogger(__name__)

CLIENT_LEFT = 499
"""Status of an answer that nobody reads, as proxies log it."""

DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": still here\n\n"
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What the client wants to get.

    Attributes:
        num_choices: Choices of each prompt.
        has_logprobs: Whether it asked for log-probabilities.
        has_usage: Whether a stream ends with a usage chunk.
        keep_alive_s: Silence after which a stream gets a comment line.
        echoes: Text before each choice's own, by index; empty without echo.
    """

    num_choices: int
    has_logprobs: bool
    has_usage: bool
    keep_alive_s: float
    echoes: Sequence[str] = ()


@dataclass(slots=True)
class _Choice:
    """What has come of one sequence; changed by whoever reads the call."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TextLogprob] = field(default_factory=list)
    end: FinishedText | None = None


async def answer_at_once(
    request: Request, call: Call, shape: Shape, options: AnswerOptions
) -> Response:
    """Wait for all of a call and answer with one object; a client that leaves aborts it.

    Raises:
        ApiError: A sequence was refused, failed or was aborted; the others are aborted too.
    """
    choices = [_Choice() for _ in call.uids]
    async with leaving_with_client(request.receive, call):
        while pieces := await call.next():
            for piece in pieces:
                _collect(choices[piece.number], piece)
    ends = [choice.end for choice in choices if choice.end is not None]
    if len(ends) < len(choices):
        return Response(status_code=CLIENT_LEFT)
    content = [
        shape.choice(
            index,
            (options.echoes[index] if options.echoes else "") + "".join(choice.texts),
            end,
            choice.logprobs if options.has_logprobs else None,
        )
        for index, (choice, end) in enumerate(zip(choices, ends, strict=True))
    ]
    return JSONResponse(shape.answer(content, usage(ends, options.num_choices)))


class EventStream(Response):
    """A call as server-sent events.

    The status line waits for the first piece, so that a refusal still gets its own status; after
    ``keep_alive_s`` it is sent anyway, and what goes wrong from then on is an event.
    """

    def __init__(self, call: Call, shape: Shape, options: AnswerOptions) -> None:
        """Stream ``call``; whoever made it hands it over."""
        super().__init__()
        self._call = call
        self._shape = shape
        self._options = options
        self._choices = [_Choice() for _ in call.uids]
        self._ends: dict[int, FinishedText] = {}
        self._is_started = False
        self._has_opened = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; a client that leaves aborts the call."""
        try:
            async with leaving_with_client(receive, self._call):
                await self._run(send)
        except ApiError as error:
            if not self._is_started:
                raise
            await _send(send, event(error.body()), is_last=True)

    async def _run(self, send: Send) -> None:
        while pieces := await self._next(send):
            body = self._render(pieces)
            if body:
                await self._start(send)
                await _send(send, body)
        if len(self._ends) < len(self._choices):
            return  # the client has gone
        await self._start(send)
        await _send(send, self._closing(), is_last=True)

    async def _next(self, send: Send) -> list[Piece]:
        """Wait for pieces, with a sign of life after each while without any."""
        while True:
            try:
                async with asyncio.timeout(self._options.keep_alive_s):
                    return await self._call.next()
            except TimeoutError:
                await self._start(send)
                await _send(send, _KEEP_ALIVE)

    async def _start(self, send: Send) -> None:
        if not self._is_started:
            self._is_started = True
            headers = [*self.raw_headers, *_SSE_HEADERS]
            headers = [(name, value) for name, value in headers if name != b"content-length"]
            await send({"type": "http.response.start", "status": 200, "headers": headers})

    def _render(self, pieces: list[Piece]) -> bytes:
        """Write events of pieces, one per sequence and kind."""
        touched: dict[int, _Choice] = {}
        for piece in pieces:
            choice = touched.setdefault(piece.number, self._choices[piece.number])
            _collect(choice, piece)
        if not touched:
            return b""
        events = [] if self._has_opened else self._opening()
        for index, choice in touched.items():
            text = "".join(choice.texts)
            # Log-probabilities wait for the text of their tokens, or for the end.
            if text:
                logprobs = self._take_logprobs(choice)
                choice.texts.clear()
                events.append(self._event([self._shape.delta(index, text, logprobs)]))
            if choice.end is not None and index not in self._ends:
                self._ends[index] = choice.end
                rest = self._take_logprobs(choice) if choice.logprobs else None
                events.append(self._event([self._shape.ending(index, choice.end, rest)]))
        return b"".join(events)

    def _opening(self) -> list[bytes]:
        """Write what comes before all text: roles, and prompts that are echoed."""
        self._has_opened = True
        events = []
        for index in range(len(self._choices)):
            opening = self._shape.opening(index)
            if opening is not None:
                events.append(self._event([opening]))
            if self._options.echoes:
                echo = self._options.echoes[index]
                events.append(self._event([self._shape.delta(index, echo, None)]))
        return events

    def _take_logprobs(self, choice: _Choice) -> list[TextLogprob] | None:
        if not self._options.has_logprobs:
            return None
        taken, choice.logprobs = choice.logprobs, []
        return taken

    def _closing(self) -> bytes:
        if not self._options.has_usage:
            return DONE
        ends = [self._ends[index] for index in range(len(self._choices))]
        chunk = self._shape.chunk([]) | {"usage": usage(ends, self._options.num_choices)}
        return event(chunk) + DONE

    def _event(self, choices: list[dict[str, Any]]) -> bytes:  # JSON
        chunk = self._shape.chunk(choices)
        if self._options.has_usage:
            chunk["usage"] = None
        return event(chunk)


def event(content: dict[str, Any]) -> bytes:  # JSON
    """Write one server-sent event."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


def check_end(end: FinishedText) -> None:
    """Raise what a terminal result says, unless it is an ordinary end.

    Raises:
        ApiError: The sequence was refused, failed or was aborted.
    """
    if end.refusal == "invalid":
        raise from_request_error(end.detail)
    if end.refusal == "full":
        raise overloaded(end.detail)
    if end.reason == "error":
        raise ApiError(500, end.detail or "the engine failed", code="engine_error")
    if end.reason == "abort":
        raise ApiError(503, f"the request was aborted: {end.detail}", code="aborted")


@asynccontextmanager
async def leaving_with_client(receive: Receive, call: Call) -> AsyncIterator[None]:
    """Abort what is left of a call when its client goes, or when the block ends early."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        call.leave("the client left")

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        call.leave("the answer has ended")


def _collect(choice: _Choice, piece: Piece) -> None:
    if piece.text:
        choice.texts.append(piece.text)
    if piece.logprob is not None:
        choice.logprobs.append(piece.logprob)
    if piece.end is not None:
        check_end(piece.end)
        choice.end = piece.end


async def _send(send: Send, body: bytes, is_last: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not is_last})
