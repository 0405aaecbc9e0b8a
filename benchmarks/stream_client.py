"""Clients that stream completions from a server and do little else, so that it is what is measured.

Each is a process with an event loop of its own. It keeps its connections from one request to the
next, as real clients do. It looks for marks in the bytes of an answer, and parses only its usage.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Self

from minisgl.errors import ProtocolError, WorkerError

Prompt = list[int]  # token ids


@dataclass(frozen=True, slots=True)
class Timing:
    """When things happened to one stream, in seconds of a clock that all processes share.

    Attributes:
        sent_s: The request was sent.
        pieces_s: A piece of text came; one entry each.
        ended_s: The answer was complete.
    """

    sent_s: float
    pieces_s: list[float]
    ended_s: float


class StreamClients:
    """Client processes, as a context manager."""

    def __init__(self, host: str, port: int, num_processes: int) -> None:
        """Start them; they connect when they have requests to send."""
        # Spawned, as no thread or GPU context of this process may come along.
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self.pids: list[int] = []
        for _ in range(num_processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_run, args=(theirs, host, port), daemon=True)
            process.start()
            theirs.close()
            assert process.pid is not None, "it was started"
            self._pipes.append(ours)
            self.pids.append(process.pid)

    def stream(self, prompts: list[Prompt], max_tokens: int) -> list[Timing]:
        """Stream greedy completions of exactly ``max_tokens`` tokens, all at once.

        Raises:
            WorkerError: A client failed; its traceback is on stderr.
        """
        try:
            for index, pipe in enumerate(self._pipes):
                pipe.send((prompts[index :: len(self._pipes)], max_tokens))
            return [timing for pipe in self._pipes for timing in pipe.recv()]
        except (EOFError, OSError) as error:
            raise WorkerError("a client failed; its traceback is on stderr") from error

    def __enter__(self) -> Self:
        """They were started already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let them end, as each does when its pipe closes."""
        for pipe in self._pipes:
            pipe.close()


def _run(pipe: Connection, host: str, port: int) -> None:
    """Answer each list of prompts with its timings, until the pipe closes."""
    streams: list[_Stream] = []
    with asyncio.Runner() as runner:
        while True:
            try:
                prompts, max_tokens = pipe.recv()
            except EOFError:
                return
            while len(streams) < len(prompts):
                streams.append(runner.run(_Stream.connect(host, port)))
            pipe.send(runner.run(_stream_all(streams, prompts, max_tokens)))


async def _stream_all(
    streams: list[_Stream], prompts: list[Prompt], max_tokens: int
) -> list[Timing]:
    requests = [_request(prompt, max_tokens) for prompt in prompts]
    pairs = zip(streams, requests, strict=False)
    return await asyncio.gather(*(stream.complete(each, max_tokens) for stream, each in pairs))


def _request(prompt: Prompt, max_tokens: int) -> bytes:
    """Return all bytes of a request."""
    body = {
        "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


class _Stream:
    """A connection that is kept, for one request after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, host: str, port: int) -> Self:
        """Open it."""
        return cls(*await asyncio.open_connection(host, port))

    async def complete(self, request: bytes, max_tokens: int) -> Timing:
        """Send a request and read its answer.

        Raises:
            ProtocolError: The answer is no stream of ``max_tokens`` tokens, or has no text.
            EOFError: The server closed the connection.
        """
        sent_s = time.perf_counter()
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 "):
            body = await self._reader.read(1 << 16)
            raise ProtocolError(f"the server answers {(head + body).decode()}")
        pieces_s = []
        event = last = b""
        # HTTP's chunks are not told apart, as each ends with an event: the line between two of them
        # is read as the begin of the next event, which nobody looks at.
        while not event.endswith(b"data: [DONE]\n\n"):
            last = event
            event = await self._reader.readuntil(b"\n\n")
            # The event that tells why the answer ended has no text, that of the usage no choice.
            if b'"text":"' in event and b'"text":""' not in event:
                pieces_s.append(time.perf_counter())
        await self._reader.readuntil(b"\r\n0\r\n\r\n")  # the body's end; the next answer follows
        ended_s = time.perf_counter()
        usage = json.loads(last[last.index(b"{") :]).get("usage")
        if not (usage and pieces_s) or usage["completion_tokens"] != max_tokens:
            raise ProtocolError(
                f"asked for {max_tokens} tokens, got {len(pieces_s)} pieces of text and at the end "
                f"{last.decode()}"
            )
        return Timing(sent_s, pieces_s, ended_s)
