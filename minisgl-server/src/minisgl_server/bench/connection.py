"""One connection to the server under load; it counts bytes, to know when nothing is on its way."""

from __future__ import annotations

import asyncio
import ssl
from typing import Self

from minisgl_server.bench.base_url import BaseUrl

LIMIT = 1 << 24  # of one line, in bytes


class Connection:
    """Bytes to and from the server."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fed: _Counted
    ) -> None:
        """Take over an open connection, whose reader ``fed`` feeds; ``open`` makes one."""
        self._reader = reader
        self._writer = writer
        self._fed = fed
        self._num_read = 0

    @classmethod
    async def open(cls, url: BaseUrl, tls: ssl.SSLContext | None) -> Self:
        """Connect.

        Raises:
            OSError: That failed.
        """
        # What asyncio.open_connection does, with a protocol that counts.
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(LIMIT, loop)
        protocol = _Counted(reader, loop=loop)
        transport, _ = await loop.create_connection(lambda: protocol, url.host, url.port, ssl=tls)
        return cls(reader, asyncio.StreamWriter(transport, protocol, reader, loop), protocol)

    @property
    def num_received(self) -> int:
        """Bytes that have come, whether they were read or not."""
        return self._fed.num_bytes

    @property
    def is_quiet(self) -> bool:
        """Whether it is open, as far as one knows, and everything that came was read."""
        is_open = not (self._reader.at_eof() or self._writer.is_closing())
        return is_open and self.num_received == self._num_read

    async def write(self, data: bytes) -> None:
        """Send bytes; ``OSError`` when the connection is gone."""
        self._writer.write(data)
        await self._writer.drain()

    async def read(self, max_bytes: int) -> bytes:
        """Return the next bytes, empty at the end; ``OSError`` as for all that read."""
        return self._count(await self._reader.read(max_bytes))

    async def read_exactly(self, num_bytes: int) -> bytes:
        """Return so many bytes; ``EOFError`` when they do not come."""
        return self._count(await self._reader.readexactly(num_bytes))

    async def read_until(self, end: bytes) -> bytes:
        """Return all up to ``end`` and with it.

        Raises:
            EOFError: It does not come.
            asyncio.LimitOverrunError: It does not within ``LIMIT`` bytes.
        """
        return self._count(await self._reader.readuntil(end))

    def close(self) -> None:
        """Close it now: nobody waits for what is still on its way, or for TLS's farewell."""
        self._writer.close()
        self._writer.transport.abort()

    def _count(self, data: bytes) -> bytes:
        self._num_read += len(data)
        return data


class _Counted(asyncio.StreamReaderProtocol):
    """Feeds a reader, and counts what it feeds."""

    num_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Pass it on."""
        self.num_bytes += len(data)
        super().data_received(data)
