"""What every request passes before it reaches a route."""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl_server.api.errors import ApiError

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health"})
"""What needs no key: a liveness probe has none. Everything else does, new routes too."""

_GOOD_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestIds:
    """Gives each response an ``X-Request-Id``: the client's, if it is a sane one, or a new one.

    It only labels logs and responses; the engine uses ids of its own.
    """

    def __init__(self, app: ASGIApp) -> None:
        """Wrap ``app``."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _GOOD_ID.fullmatch(given) else secrets.token_hex(16)
        started_s, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if logger.isEnabledFor(logging.DEBUG):
                _log(scope, request_id, status, time.perf_counter() - started_s)


class RootPath:
    """Takes paths with and without the prefix under which a proxy offers the server."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        """Wrap ``app``."""
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        await self._app({**scope, "root_path": self._root_path}, receive, send)


class ApiKeys:
    """Lets only those in who send a key; denies by default."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], root_path: str) -> None:
        """Wrap ``app``.

        Args:
            app: Inner application.
            keys: Any of them opens every route.
            root_path: Prefix under which a proxy may pass requests on.
        """
        self._app = app
        self._digests = [_digest(key) for key in keys]
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401."""
        if scope["type"] != "lifespan" and not self._is_allowed(scope):
            error = ApiError(
                401,
                "a key is needed: send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": self._challenge(scope)},
            )
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        path: str = scope["path"]
        if path.removeprefix(self._root_path) in OPEN_PATHS:
            return True
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() == "basic":
            key = _password(key)
        digest = _digest(key.strip())
        # All are compared, each in constant time, so that time tells nothing about any of them.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() in ("bearer", "basic") and any(matches)

    def _challenge(self, scope: Scope) -> str:
        """Let browsers ask for the key on the page: as a password, with any user name."""
        path: str = scope["path"]
        is_page = path.removeprefix(self._root_path) in ("", "/")
        return 'Basic realm="minisgl"' if is_page else "Bearer"


def _log(scope: Scope, request_id: str, status: int, seconds: float) -> None:
    """Write a request's line; status 0 is one that never got an answer."""
    fields = {
        "request_id": request_id,
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "seconds": round(seconds, 4),
    }
    logger.debug(
        "%s %s: %d in %.3f s, id %s",
        fields["method"],
        fields["path"],
        status,
        seconds,
        request_id,
        extra=fields,
    )


def _password(credentials: str) -> str:
    """Return the password of HTTP Basic credentials, or nothing."""
    try:
        text = base64.b64decode(credentials, validate=True).decode()
    except ValueError:
        return ""
    return text.partition(":")[2]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
