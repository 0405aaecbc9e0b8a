"""Where the server under load is, and which model it serves."""

from __future__ import annotations

import json
import re
import socket
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import SplitResult, urlsplit
from urllib.request import Request, urlopen

from minisgl.errors import SettingsError

_VISIBLE = re.compile(r"[!-~]+")  # ASCII without spaces: goes into a request as it is
_PORTS = {"http": 80, "https": 443}
_TIMEOUT_S = 30


@dataclass(frozen=True, slots=True)
class BaseUrl:
    """The base URL of a server with OpenAI's API, such as ``http://127.0.0.1:1919/v1``.

    Attributes:
        text: All of it, without a slash at its end.
        is_tls: Whether it is ``https``.
        host: Name or address to connect to.
        port: Port to connect to.
        netloc: Host and port as they were written, for the request's ``Host``.
        path: What every path begins with; empty or from its slash on.
    """

    text: str
    is_tls: bool
    host: str
    port: int
    netloc: str
    path: str


def parse_base_url(text: str) -> BaseUrl:
    """Take a URL apart.

    Raises:
        SettingsError: Requests cannot be sent there.
    """
    if not text.lower().startswith(("http://", "https://")):
        raise SettingsError(f"--url {text}: must begin with http:// or https://")
    if not _VISIBLE.fullmatch(text):
        raise SettingsError(f"--url {text!r}: must be ASCII without spaces")
    try:
        parts = urlsplit(text.rstrip("/"))
        port = _port(parts)
        host = parts.hostname or ""
        host.encode("idna")  # what connecting would fail at
    except ValueError as error:
        raise SettingsError(f"--url {text}: is no URL: {error}") from error
    if not host:
        raise SettingsError(f"--url {text}: names no host")
    if "@" in parts.netloc:
        raise SettingsError(f"--url {text}: must have no user; a key is given as --api-key")
    if parts.query or parts.fragment:
        raise SettingsError(f"--url {text}: must end with its path, without ? and #")
    base = f"{parts.scheme}://{parts.netloc}{parts.path}"
    return BaseUrl(base, parts.scheme == "https", host, port, parts.netloc, parts.path)


def check_key(key: str) -> None:
    """See that a key can be sent.

    Raises:
        SettingsError: It would break the header; the message does not show it.
    """
    if key and not _VISIBLE.fullmatch(key):
        raise SettingsError("--api-key: must be ASCII without spaces")


def check_server(url: BaseUrl) -> None:
    """See that somebody listens there.

    Raises:
        SettingsError: Nobody does.
    """
    try:
        socket.create_connection((url.host, url.port), _TIMEOUT_S).close()
    except OSError as error:
        raise _unreachable(url, error) from error


def first_model(url: BaseUrl, key: str) -> str:
    """Ask the server for the first model that it lists.

    Raises:
        SettingsError: None answers there, or something that has not OpenAI's API.
    """
    flag, asked = f"--url {url.text}", f"GET {url.path}/models"
    try:
        content = _get(f"{url.text}/models", key)
    except HTTPError as error:
        error.close()
        raise SettingsError(f"{flag}: {asked}: status {error.code}{_hint(error.code)}") from error
    except (HTTPException, ValueError, RecursionError) as error:
        # Before OSError: one that closes without a word is both, and there is a server then.
        reason = f"{type(error).__name__}: {error}"
        raise SettingsError(f"{flag}: {asked}: no answer of OpenAI's API: {reason}") from error
    except OSError as error:
        raise _unreachable(url, error) from error
    try:
        name = content["data"][0]["id"]
    except (LookupError, TypeError):
        name = None
    if not isinstance(name, str):
        raise SettingsError(f"{flag}: {asked}: lists no model; name one with --model")
    return name


def _unreachable(url: BaseUrl, error: OSError) -> SettingsError:
    return SettingsError(f"--url {url.text}: no server answers there: {error}")


def _get(url: str, key: str) -> Any:  # JSON
    request = Request(url)
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    with urlopen(request, timeout=_TIMEOUT_S) as response:
        return json.loads(response.read())


def _hint(status: int) -> str:
    """Say what mostly helps."""
    if status in (401, 403):
        return "; see --api-key"
    return "; the base URL mostly ends in /v1" if status == 404 else ""


def _port(parts: SplitResult) -> int:
    port = parts.port
    if port == 0:
        raise ValueError("port 0 cannot be connected to")
    return _PORTS[parts.scheme] if port is None else port
