"""One-way queues of messages between processes, over ZMQ ipc sockets.

The receiver binds, any number of senders connect. Sending never waits: queues have no limit, and a
receiver that is gone is noticed by whoever watches the process. Not thread-safe: a queue belongs
to the thread that uses it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import zmq

from minisgl.errors import ProtocolError
from minisgl.message.codec import Codec

logger = logging.getLogger(__name__)

_LINGER_MS = 1000  # last words get this long to leave a process that ends


class PushQueue:
    """The sending end."""

    def __init__(self, context: zmq.Context[Any], path: Path, codec: Codec[Any]) -> None:
        """Connect to a receiver, which need not be there yet.

        Args:
            context: Of this process.
            path: Socket file of the receiver.
            codec: Knows the messages.
        """
        self._codec = codec
        self._socket = _socket(context, zmq.PUSH)
        self._socket.connect(f"ipc://{path}")

    def send(self, messages: Iterable[object]) -> None:
        """Send messages as one frame, in order; returns at once.

        Raises:
            ProtocolError: A type is not registered. Nothing was sent.
        """
        self._socket.send(self._codec.encode(messages), zmq.NOBLOCK)

    def close(self) -> None:
        """Let what was sent leave, then close."""
        self._socket.close()


class PullQueue:
    """The receiving end."""

    def __init__(self, context: zmq.Context[Any], path: Path, codec: Codec[Any]) -> None:
        """Bind to a socket file that does not exist yet."""
        self._codec = codec
        self._socket = _socket(context, zmq.PULL)
        self._socket.bind(f"ipc://{path}")

    @property
    def file_descriptor(self) -> int:
        """Becomes readable when something may have come; then call `receive` without blocking."""
        descriptor = self._socket.getsockopt(zmq.FD)
        assert isinstance(descriptor, int), "the library says so"
        return descriptor

    def receive(self, block: bool) -> list[Any]:  # Any: the codec's messages
        """Return everything that has come, in order of each sender.

        Args:
            block: Sleep until something comes.
        """
        messages: list[Any] = []  # Any: as above
        if block:
            self._socket.poll()
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            try:
                messages += self._codec.decode(frame)
            except ProtocolError as error:
                # The folder is private, so this is a bug of ours; others must not suffer from it.
                logger.error("a frame was dropped: %s", error)

    def close(self) -> None:
        """Close; what was not received is lost."""
        self._socket.close()


def _socket(context: zmq.Context[Any], kind: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    return socket
