"""A small client for one streamed completion; light, so that it measures the server."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from minisgl.errors import ProtocolError
from minisgl_server.bench.base_url import BaseUrl

_LIMIT = 1 << 24  # of one line, in bytes
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
    url: BaseUrl,
    body: dict[str, Any],  # JSON
    key: str,
    timeout_s: float,
) -> Timing:
    """Stream a completion from ``url`` and time it; what goes wrong is in the result."""
    timing = Timing(time.perf_counter())
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit, aclosing(_events(url, body, key)) as events:
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


async def _events(url: BaseUrl, body: dict[str, Any], key: str) -> AsyncGenerator[Any]:  # JSON
    """Send a request and yield the events of its answer.

    Raises:
        OSError: There is no connection, or no more.
        ValueError: The request cannot be sent.
        ProtocolError: The answer is no stream of events, or its status is not 200.
    """
    context = ssl.create_default_context() if url.is_tls else None
    reader, writer = await asyncio.open_connection(url.host, url.port, ssl=context, limit=_LIMIT)
    try:
        content = json.dumps(body).encode()
        authorization = f"Authorization: Bearer {key}\r\n" if key else ""
        head = (
            f"POST {url.path}/completions HTTP/1.1\r\nHost: {url.netloc}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
            f"Connection: close\r\n{authorization}\r\n"
        )
        writer.write(head.encode() + content)
        await writer.drain()
        is_chunked = await _read_head(reader)
        async for line in _lines(reader, is_chunked):
            if line.startswith(b"data: {"):
                yield _parsed(line[6:])
    finally:
        writer.close()


async def _read_head(reader: asyncio.StreamReader) -> bool:
    """Return whether the body comes in chunks."""
    try:
        lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
        protocol, status = lines[0].split()[:2]
        if not (protocol.startswith(b"http/1.") and status.isdigit()):
            raise ValueError("no status")
    except (ValueError, EOFError, asyncio.LimitOverrunError) as error:
        raise ProtocolError("the server does not answer in HTTP/1.1") from error
    if status != b"200":
        body = b""
        while len(body) < _LIMIT and (data := await reader.read(1 << 16)):
            body += data
        text = body.decode(errors="replace")
        raise ProtocolError(f"status {status.decode()}: {text[-_SHOWN:]}")
    return b"transfer-encoding: chunked" in lines


async def _lines(reader: asyncio.StreamReader, is_chunked: bool) -> AsyncIterator[bytes]:
    rest = b""
    try:
        async for data in _body(reader, is_chunked):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                yield line
            if len(rest) > _LIMIT:
                raise ValueError("a line without end")
    except (ValueError, EOFError, asyncio.LimitOverrunError) as error:
        raise ProtocolError(f"the answer is cut or no stream of events: {error}") from error


async def _body(reader: asyncio.StreamReader, is_chunked: bool) -> AsyncIterator[bytes]:
    while is_chunked:
        size = int((await reader.readuntil(b"\n")).split(b";")[0], 16)
        if size == 0:
            return
        yield (await reader.readexactly(size + 2))[:-2]
    while data := await reader.read(1 << 16):
        yield data


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
