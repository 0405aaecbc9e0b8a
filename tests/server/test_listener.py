"""What connections to the server are like."""

from __future__ import annotations

import asyncio
import socket

import pytest

from minisgl_server.listener import Listener
from minisgl_server.settings import ServerSettings


async def is_sent_at_once(listener: Listener) -> bool:
    """Connect to a server of asyncio's, as uvicorn's is: whether the server's end waits not."""
    accepted: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()

    def on_connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set_result(writer)

    async with await asyncio.start_server(on_connect, sock=listener.socket):
        host, port = listener.socket.getsockname()[:2]
        _, ours = await asyncio.open_connection(host, port)
        theirs = await accepted
        end: socket.socket = theirs.get_extra_info("socket")
        no_delay = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        for writer in (ours, theirs):
            writer.close()
            await writer.wait_closed()
    return no_delay != 0


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_small_pieces_of_an_answer_are_sent_at_once(host: str) -> None:
    # Else each waits until the client acknowledges the one before, which it puts off for 40 ms.
    listener = Listener(ServerSettings.model_validate({"host": host, "port": 0}))
    try:
        assert asyncio.run(is_sent_at_once(listener))
    finally:
        listener.close()
