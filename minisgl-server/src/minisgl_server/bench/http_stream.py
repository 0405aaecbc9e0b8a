"""A small client for one streamed completion; light, so that it measures the server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

from minisgl.errors import ProtocolError
from minisgl_server.bench.connection import LIMIT
from minisgl_server.bench.connection_pool import ConnectionPool
from minisgl_server.bench.http_answer import Answer

_SHOWN = 300  # letters of an answer that an error shows


@dataclass(slots=True)
class Timing:
    """What one request took; filled while it runs.

    Attributes:
        start_s: When it was sent, by ``time.perf_counter``.
        piece_s: When each piece of text came.
        end_s: When it ended.
        num_prompt_tokens: As the server counted.
        num_output_tokens: As the server counted.
        error: What went wrong, or empty.
    """

    start_s: float
    piece_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    error: str = ""

    @property
    def first_token_s(self) -> float:
        """Seconds to the first piece of text."""
        return self.piece_s[0] - self.start_s if self.piece_s else self.end_s - self.start_s

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between pieces."""
        return [b - a for a, b in zip(self.piece_s, self.piece_s[1:], strict=False)]

    @property
    def total_s(self) -> float:
        """Seconds to the end."""
        return self.end_s - self.start_s


async def time_completion(
    pool: ConnectionPool,
    body: dict[str, Any],  # JSON
    key: str,
    timeout_s: float,
) -> Timing:
    """Stream a completion and time it; what goes wrong is in the result.

    Args:
        pool: Connections to the server.
        body: What to ask for; a stream, with its usage.
        key: Of the server, or empty.
        timeout_s: Seconds that all of it may take, connecting included.
    """
    timing = Timing(time.perf_counter())
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit, aclosing(_events(pool, body, key)) as events:
            async for event in events:
                _note(timing, event)
    except ProtocolError as error:
        timing.error = str(error)
    except (OSError, ValueError, RecursionError) as error:
        timing.error = f"{type(error).__name__}: {error}"
    if limit.expired():
        timing.error = f"no complete answer within {timeout_s:g} s (--request-timeout-s)"
    timing.end_s = time.perf_counter()
    if not timing.error and not timing.num_output_tokens:
        timing.error = "the stream ended without usage"
    return timing


def _note(timing: Timing, event: Any) -> None:  # JSON, of any shape
    """Add what an event says.

    Raises:
        ProtocolError: It is an error, or no event of a completion.
    """
    try:
        if "error" in event:
            raise ProtocolError(f"the server says {_message(event['error'])}")
        has_text = any(choice.get("text") for choice in event["choices"])
        if usage := event.get("usage"):
            counts = usage["prompt_tokens"], usage["completion_tokens"]
            if not all(type(count) is int for count in counts):
                raise TypeError("counts are no integers")
            timing.num_prompt_tokens, timing.num_output_tokens = counts
    except (LookupError, TypeError, AttributeError) as error:
        shown = json.dumps(event)[:_SHOWN]
        raise ProtocolError(f"no event of a completion: {shown}") from error
    if has_text:
        timing.piece_s.append(time.perf_counter())


async def _events(
    pool: ConnectionPool,
    body: dict[str, Any],  # JSON
    key: str,
) -> AsyncGenerator[Any]:  # JSON
    """Send a request and yield the events of its answer.

    Raises:
        OSError: There is no connection, or no more.
        ValueError: The request cannot be sent.
        ProtocolError: The answer is no stream of events, or its status is not 200.
    """
    content = json.dumps(body).encode()
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    head = (
        f"POST {pool.url.path}/completions HTTP/1.1\r\nHost: {pool.url.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        f"{authorization}\r\n"
    )
    async with pool.ask(head.encode() + content) as answer:
        if answer.status != b"200":
            raise ProtocolError(f"status {answer.status.decode()}: {await _refusal(answer)}")
        async for line in _lines(answer):
            if line.startswith(b"data: {"):
                yield _parsed(line[6:])


async def _refusal(answer: Answer) -> str:
    """Return the end of what a server says in place of a completion."""
    body = b""
    # A refusal that is cut is one still, and its status says most of it.
    with suppress(OSError, ValueError, EOFError, asyncio.LimitOverrunError):
        async with aclosing(answer.body()) as pieces:
            async for data in pieces:
                body += data
                if len(body) > LIMIT:
                    break
    return body.decode(errors="replace")[-_SHOWN:]


async def _lines(answer: Answer) -> AsyncIterator[bytes]:
    rest = b""
    try:
        async for data in answer.body():
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                yield line
            if len(rest) > LIMIT:
                raise ValueError("a line without end")
    except (ValueError, EOFError, asyncio.LimitOverrunError) as error:
        raise ProtocolError(f"the answer is cut or no stream of events: {error}") from error


def _parsed(line: bytes) -> Any:  # JSON
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        shown = line[:_SHOWN].decode(errors="replace")
        raise ProtocolError(f"no event of a completion: {shown}") from error


def _message(error: Any) -> str:  # JSON, of any shape
    """Return the text of an error, which OpenAI's API has as ``message``."""
    text = error.get("message") if isinstance(error, dict) else error
    return str(text)
