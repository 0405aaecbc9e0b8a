"""The socket that the server listens on, taken before anything slow happens."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from pathlib import Path

from minisgl.errors import SettingsError
from minisgl_server.settings import ServerSettings

_BACKLOG = 2048


class Listener:
    """A listening socket; clients that come before the server is ready wait for it."""

    def __init__(self, settings: ServerSettings) -> None:
        """Bind and listen.

        Raises:
            SettingsError: Address or port cannot be had, or the TLS files cannot be used.
        """
        check_tls(settings)
        self._path = None if settings.uds is None else Path(settings.uds)
        self._is_tls = settings.ssl_certfile is not None
        if self._path is not None:
            self.socket = _bind_unix(self._path)
        else:
            self.socket = _bind_tcp(settings.host, settings.port)

    @property
    def url(self) -> str:
        """Where clients find the server."""
        scheme = "https" if self._is_tls else "http"
        if self._path is not None:
            return f"{scheme}+unix://{self._path}"
        host, port = self.socket.getsockname()[:2]
        if host in ("0.0.0.0", "::"):
            host = "127.0.0.1" if host == "0.0.0.0" else "::1"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def close(self) -> None:
        """Stop listening and remove the socket file; safe to call twice."""
        self.socket.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None


def check_tls(settings: ServerSettings) -> None:
    """Load certificate and key once, so that a mistake shows at start.

    Raises:
        SettingsError: One is missing or cannot be used.
    """
    if settings.ssl_certfile is None:
        if settings.ssl_keyfile is not None:
            raise SettingsError("--ssl-keyfile: needs --ssl-certfile as well")
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except OSError as error:
        raise SettingsError(
            f"--ssl-certfile {settings.ssl_certfile}: cannot be used: {error}"
        ) from error


def _bind_tcp(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise SettingsError(f"--host {host}: is no address of this machine: {error}") from error
    # The protocol too: only on connections that name it does asyncio send small pieces at once
    # (TCP_NODELAY). Else they wait for the client to acknowledge what came before, 40 ms each.
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)  # at once: two sockets can be bound to a port, but not listen
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise SettingsError(
                f"--port {port}: is in use on {host}; choose another, or 0 for a free one"
            ) from error
        raise SettingsError(f"--host {host} --port {port}: {error.strerror}") from error
    return listener


def _bind_unix(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            _remove_stale(path)
        listener.bind(os.fspath(path))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise SettingsError(f"--uds {path}: {error.strerror or error}") from error
    return listener


def _remove_stale(path: Path) -> None:
    """Remove a socket file that nobody listens on."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
    raise OSError(errno.EADDRINUSE, "another server listens on it")
