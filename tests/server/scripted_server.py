"""A server that answers what a test tells it to, and knows which connection a request came on."""

from __future__ import annotations

import re
import socket
import socketserver
import ssl
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import BinaryIO, Literal

TIMEOUT_S = 30.0

Then = Literal["keep", "close", "reset"]


@dataclass(frozen=True, slots=True)
class Reply:
    """What a request is answered, and what becomes of its connection."""

    data: bytes
    then: Then = "keep"


class ScriptedServer(socketserver.ThreadingTCPServer):
    """Gives one reply after the other, the last again and again.

    Attributes:
        seen: The number of each request's connection, from 1 on, in the order they came.
    """

    request_queue_size = 100  # connections that come at once

    def __init__(
        self, replies: Sequence[Reply], at_once: int = 1, tls: ssl.SSLContext | None = None
    ) -> None:
        """Listen; requests are answered as soon as there are ``at_once`` that wait."""
        super().__init__(("127.0.0.1", 0), _Handler)
        self.seen: list[int] = []
        self.tls = tls
        self._replies = replies
        self._lock = threading.Lock()
        self._gate = threading.Barrier(at_once, timeout=TIMEOUT_S)
        self._num_connections = 0

    @property
    def url(self) -> str:
        scheme = "https" if self.tls else "http"
        return f"{scheme}://127.0.0.1:{self.server_address[1]}/v1"

    def number_connection(self) -> int:
        with self._lock:
            self._num_connections += 1
            return self._num_connections

    def reply(self, connection: int) -> Reply:
        with self._lock:
            self.seen.append(connection)
            reply = self._replies[min(len(self.seen), len(self._replies)) - 1]
        self._gate.wait()
        return reply


class _Handler(socketserver.BaseRequestHandler):
    server: ScriptedServer

    def handle(self) -> None:
        """Answer requests until one side has enough."""
        connection: socket.socket = self.request
        connection.settimeout(TIMEOUT_S)
        with suppress(OSError):  # who only looks whether somebody listens speaks no TLS
            if self.server.tls:
                connection = self.server.tls.wrap_socket(connection, server_side=True)
            with connection, connection.makefile("rb") as requests:
                self._answer(connection, _bodies(requests))

    def _answer(self, connection: socket.socket, bodies: Iterator[bytes]) -> None:
        number = 0
        for _ in bodies:
            number = number or self.server.number_connection()
            reply = self.server.reply(number)
            connection.sendall(reply.data)
            if reply.then == "reset":
                linger = struct.pack("ii", 1, 0)  # none: what close() sends is a reset
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            if reply.then != "keep":
                return


def _bodies(requests: BinaryIO) -> Iterator[bytes]:
    """Yield each request's body."""
    length = 0
    for line in requests:
        if found := re.match(rb"content-length: (\d+)", line.lower()):
            length = int(found[1])
        if line == b"\r\n":
            yield requests.read(length)


@contextmanager
def scripted(
    *replies: Reply, at_once: int = 1, tls: ssl.SSLContext | None = None
) -> Iterator[ScriptedServer]:
    with ScriptedServer(replies, at_once, tls) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(TIMEOUT_S)
