"""One answer in HTTP/1.1, read so that the next one on its connection begins where it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Self

from minisgl.errors import ProtocolError
from minisgl_server.bench.connection import Connection

_PIECE = 1 << 16  # bytes
_WITHOUT_BODY = (b"204", b"304")


@dataclass(slots=True)
class Answer:
    """An answer whose head was read; ``body`` changes it.

    Attributes:
        connection: Where its body comes from.
        status: Three digits.
        is_chunked: Whether the body comes in chunks.
        num_bytes: Length of the body; ``None`` if its chunks or the connection's end say it.
        is_kept: Whether the server does not say that it closes the connection after it.
        is_over: Whether all of its body was read.
    """

    connection: Connection
    status: bytes
    is_chunked: bool
    num_bytes: int | None
    is_kept: bool
    is_over: bool = False

    @classmethod
    async def read(cls, connection: Connection) -> Self:
        """Read its head.

        Raises:
            OSError: The connection is gone.
            ProtocolError: There is none, or it is not HTTP's.
        """
        try:
            answer = cls._parsed(connection, await connection.read_until(b"\r\n\r\n"))
            while answer.status.startswith(b"1"):  # that the answer is still to come
                answer = cls._parsed(connection, await connection.read_until(b"\r\n\r\n"))
        except (ValueError, EOFError, asyncio.LimitOverrunError) as error:
            raise ProtocolError("the server does not answer in HTTP/1.1") from error
        return answer

    @classmethod
    def _parsed(cls, connection: Connection, head: bytes) -> Self:
        """Take a head apart; ``ValueError`` where that fails."""
        first, *lines = head.lower().rstrip(b"\r\n").split(b"\r\n")
        protocol, status = first.split()[:2]
        if not (protocol.startswith(b"http/1.") and len(status) == 3 and status.isdigit()):
            raise ValueError("no status")
        pairs = (line.partition(b":") for line in lines)
        headers = {name.strip(): value.strip() for name, _, value in pairs}
        is_chunked = headers.get(b"transfer-encoding", b"").endswith(b"chunked")
        length = b"0" if status in _WITHOUT_BODY else headers.get(b"content-length")
        options = [option.strip() for option in headers.get(b"connection", b"").split(b",")]
        is_kept = b"keep-alive" in options if protocol == b"http/1.0" else b"close" not in options
        if length is not None and not length.isdigit():
            raise ValueError("no length")
        num_bytes = None if is_chunked or length is None else int(length)
        return cls(connection, status, is_chunked, num_bytes, is_kept)

    @property
    def is_reusable(self) -> bool:
        """Whether another request may go where this answer came from."""
        return self.is_over and self.is_kept

    def body(self) -> AsyncGenerator[bytes]:
        """Return what yields the body as it comes.

        Raises:
            OSError: The connection is gone.
            EOFError: It has ended too early.
            ValueError: Chunks are not as they must be.
            asyncio.LimitOverrunError: The same.
        """
        if self.is_chunked:
            return self._chunks()
        return self._rest() if self.num_bytes is None else self._bytes(self.num_bytes)

    async def _chunks(self) -> AsyncGenerator[bytes]:
        while size := int((await self.connection.read_until(b"\n")).split(b";")[0], 16):
            data = await self.connection.read_exactly(size + 2)
            if not data.endswith(b"\r\n"):
                raise ValueError("a chunk is longer than it says")
            yield data[:-2]
        while (await self.connection.read_until(b"\n")).strip():
            pass  # headers may follow the last chunk, and an empty line does
        self.is_over = True

    async def _bytes(self, num_bytes: int) -> AsyncGenerator[bytes]:
        num_left = num_bytes
        while num_left:
            if not (data := await self.connection.read(min(num_left, _PIECE))):
                raise EOFError(f"{num_left} of {num_bytes} bytes are missing")
            num_left -= len(data)
            yield data
        self.is_over = True

    async def _rest(self) -> AsyncGenerator[bytes]:
        while data := await self.connection.read(_PIECE):
            yield data
        self.is_over = True
