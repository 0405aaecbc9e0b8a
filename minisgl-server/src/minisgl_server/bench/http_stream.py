"""A small client for one streamed completion; light, so that it measures the server."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_LIMIT = 1 << 24  # of one line, in bytes


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


async def time_completion(url: str, body: dict[str, Any], key: str) -> Timing:  # JSON
    """Stream a completion from ``url`` and time it; what goes wrong is in the result."""
    timing = Timing(time.perf_counter())
    try:
        async for event in _events(url, body, key):
            if "error" in event:
                timing.error = str(event["error"].get("message"))
                break
            if event.get("usage"):
                timing.num_prompt_tokens = event["usage"]["prompt_tokens"]
                timing.num_output_tokens = event["usage"]["completion_tokens"]
            if any(choice.get("text") for choice in event["choices"]):
                timing.piece_s.append(time.perf_counter())
    except (OSError, ValueError, asyncio.IncompleteReadError) as error:
        timing.error = f"{type(error).__name__}: {error}"
    timing.end_s = time.perf_counter()
    if not timing.error and not timing.num_output_tokens:
        timing.error = "the stream ended without usage"
    return timing


async def _events(
    url: str, body: dict[str, Any], key: str
) -> AsyncIterator[dict[str, Any]]:  # JSON
    parts = urlsplit(url)
    context = ssl.create_default_context() if parts.scheme == "https" else None
    port = parts.port or (443 if context else 80)
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=context, limit=_LIMIT)
    try:
        content = json.dumps(body).encode()
        authorization = f"Authorization: Bearer {key}\r\n" if key else ""
        head = (
            f"POST {parts.path}/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
            f"Connection: close\r\n{authorization}\r\n"
        )
        writer.write(head.encode() + content)
        await writer.drain()
        status, is_chunked = await _read_head(reader)
        if status != 200:
            text = (await reader.read()).decode(errors="replace")
            yield {"error": {"message": f"status {status}: {text[-300:]}"}}
            return
        rest = b""
        async for data in _body(reader, is_chunked):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])
    finally:
        writer.close()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
    return int(lines[0].split()[1]), b"transfer-encoding: chunked" in lines


async def _body(reader: asyncio.StreamReader, is_chunked: bool) -> AsyncIterator[bytes]:
    while is_chunked:
        size = int((await reader.readline()).split(b";")[0], 16)
        if size == 0:
            return
        yield (await reader.readexactly(size + 2))[:-2]
    while data := await reader.read(1 << 16):
        yield data
