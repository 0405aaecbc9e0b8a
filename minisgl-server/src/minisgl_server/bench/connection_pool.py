"""Connections that are kept from one request to the next, as real clients keep them."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

from minisgl.errors import ProtocolError
from minisgl_server.bench.base_url import BaseUrl
from minisgl_server.bench.connection import Connection
from minisgl_server.bench.http_answer import Answer


class ConnectionPool:
    """Connections to one server, as an asynchronous context manager that closes them.

    One is opened only for a request that finds none free, so there are never more than there were
    requests at once.
    """

    def __init__(self, url: BaseUrl) -> None:
        """Open none yet; ``url`` stays readable."""
        self.url = url
        # Made once: it reads all certificates that this machine trusts.
        self._tls = ssl.create_default_context() if url.is_tls else None
        self._free: list[Connection] = []  # the last one used is used next

    @asynccontextmanager
    async def ask(self, request: bytes) -> AsyncIterator[Answer]:
        """Send all bytes of a request, and give its answer for the block to read.

        A server may close a connection that nobody uses just when it is used. If so, and only
        then, the request is sent a second time, on a new connection.

        Raises:
            OSError: There is no connection, or no more.
            ProtocolError: There is no answer, or it is not HTTP's.
        """
        free = self._taken()
        connection = free or await self._opened()
        answer = None
        try:
            num_received = connection.num_received
            try:
                answer = await _asked(connection, request)
            except (ProtocolError, ConnectionError):
                if free is None or connection.num_received > num_received:
                    raise
                connection.close()
                connection = await self._opened()
                answer = await _asked(connection, request)
            yield answer
        finally:
            if answer is not None and answer.is_reusable:
                self._free.append(connection)
            else:
                connection.close()

    async def __aenter__(self) -> Self:
        """Nothing to do."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close those that are free; each other one closes with its request."""
        while self._free:
            self._free.pop().close()

    def _taken(self) -> Connection | None:
        """Take the free connection that was used last; those that are none any more are closed."""
        while self._free:
            connection = self._free.pop()
            if connection.is_quiet:
                return connection
            connection.close()
        return None

    async def _opened(self) -> Connection:
        return await Connection.open(self.url, self._tls)


async def _asked(connection: Connection, request: bytes) -> Answer:
    await connection.write(request)
    return await Answer.read(connection)
