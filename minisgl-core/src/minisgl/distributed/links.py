"""A connection from each rank to rank 0 that says nothing: its end is the end of a process.

Between machines nobody sees the others' processes, and a rank with nothing to do waits in a
collective, or for a request, as long as it takes.
"""

from __future__ import annotations

import secrets
import socket
from typing import TYPE_CHECKING

from minisgl.distributed.contract import CommConfig
from minisgl.distributed.meeting import own_address
from minisgl.errors import CommError

if TYPE_CHECKING:
    from minisgl.distributed.control import ControlGroup

_TOKEN_BYTES = 16
# A machine that has lost its power or its network sends no end: ask every second, three times.
_KEEP_ALIVE = (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3))


def link_to_first(control: ControlGroup, config: CommConfig) -> list[socket.socket]:
    """Connect every rank with rank 0; all ranks call it.

    Returns:
        On rank 0 a connection to each other rank, on the others the one to rank 0.

    Raises:
        CommError: A rank cannot be reached, or did not come in time.
    """
    try:
        return _accept(control, config) if config.rank == 0 else _connect(control, config)
    except OSError as error:
        raise CommError(f"ranks cannot connect to rank 0: {error}") from error


def _accept(control: ControlGroup, config: CommConfig) -> list[socket.socket]:
    token = secrets.token_bytes(_TOKEN_BYTES)
    links: list[socket.socket] = []
    try:
        _accept_all(control, config, token, links)
    except BaseException:
        for link in links:
            link.close()
        raise
    return links


def _accept_all(
    control: ControlGroup, config: CommConfig, token: bytes, links: list[socket.socket]
) -> None:
    address = own_address(config.init_method)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:
        listener.settimeout(config.timeout_s)
        host, port = listener.getsockname()[:2]
        control.broadcast_bytes(token + f"{host} {port}".encode())
        while len(links) < config.size - 1:
            link, _ = listener.accept()
            link.settimeout(config.timeout_s)
            if link.recv(_TOKEN_BYTES, socket.MSG_WAITALL) == token:
                links.append(_kept_alive(link))
            else:
                link.close()  # nobody of ours


def _connect(control: ControlGroup, config: CommConfig) -> list[socket.socket]:
    message = control.broadcast_bytes(None)
    host, port = message[_TOKEN_BYTES:].decode().split()
    link = socket.create_connection((host, int(port)), config.timeout_s)
    link.sendall(message[:_TOKEN_BYTES])
    return [_kept_alive(link)]


def _kept_alive(link: socket.socket) -> socket.socket:
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE:
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return link
