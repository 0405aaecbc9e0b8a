"""Reading request bodies: within limits, as JSON, into a model, or a 400 that names the field."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from minisgl_server.api.errors import ApiError

_Model = TypeVar("_Model", bound=BaseModel)

BODY_TIMEOUT_S = 60.0
"""Who sends a body more slowly than this holds a connection for nothing."""

MAX_DEPTH = 64
"""Arrays and objects inside one another."""

_MAX_SHOWN = 60  # characters of a wrong value
_WORDS = (  # from pydantic's to ours
    (r"^(Input|List) should", "must"),
    (r" after validation, not \d+$", ""),
    (r"a valid dictionary( or instance of \w+)?", "a JSON object"),
)


async def read_model(request: Request, model: type[_Model], max_bytes: int) -> _Model:
    """Read a request's body into ``model``.

    Raises:
        ApiError: It is too large, no JSON, or does not fit; the error names the parameter.
        ClientDisconnect: The client has gone.
    """
    content = parse_json(await read_body(request, max_bytes))
    if not isinstance(content, dict):
        raise ApiError(400, "the body must be a JSON object")
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise describe(error, model) from error


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Read a body of at most ``max_bytes`` bytes.

    Raises:
        ApiError: It is larger, or takes too long to come.
    """
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                size += len(part)
                if size > max_bytes:
                    raise _too_large(max_bytes)
                parts.append(part)
    except TimeoutError as error:
        message = f"the body did not arrive within {BODY_TIMEOUT_S:g} s"
        raise ApiError(408, message, code="body_timeout") from error
    return b"".join(parts)


def parse_json(body: bytes) -> Any:  # JSON
    """Parse a body.

    Raises:
        ApiError: It is not JSON, nests too deeply, or holds text that is not Unicode.
    """
    try:
        # Bytes would be decoded with half surrogate pairs let through.
        text = body.decode(json.detect_encoding(body))
        content = json.loads(text)
        # Half a surrogate pair is a character for JSON, but for nobody else.
        if "\\ud" in text.lower():
            json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if _depth(content, MAX_DEPTH) <= 0:
        raise ApiError(400, f"the body nests more than {MAX_DEPTH} levels", code="invalid_json")
    return content


def describe(error: ValidationError, model: type[BaseModel]) -> ApiError:
    """Turn the first complaint of a model into an error."""
    detail = error.errors(include_url=False, include_context=False)[0]
    message = detail["msg"].removeprefix("Value error, ")
    if not detail["loc"]:
        match = re.match(r"([a-z_]+): ", message)
        return ApiError(400, message, param=match[1] if match else None)
    first, *rest = detail["loc"]
    param = str(first)
    where = param + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in rest)
    if detail["type"] == "extra_forbidden":
        return ApiError(400, f"{where}: is not a parameter of this endpoint", param=param)
    if detail["type"] == "missing":
        return ApiError(400, f"{where}: is missing", param=param)
    # What follows the first part may be the branch of a union, which is no name of a parameter.
    field = model.model_fields.get(param)
    if field is not None and (what := field.description):
        # It may be several things, and the complaint is that it is not the first of them.
        return ApiError(400, f"{param}: must be {what[0].lower()}{what[1:]}", param=param)
    for pattern, ours in _WORDS:
        message = re.sub(pattern, ours, message)
    return ApiError(400, f"{where} {_shown(detail['input'])}: {message}", param=param)


def _shown(value: object) -> str:
    """Write a value as JSON, shortened where it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def _depth(content: object, left: int) -> int:
    """Return how many more levels would be allowed; 0 or less when there are too many."""
    level = [content]
    while level and left > 0:
        inner: list[object] = []
        for item in level:
            if isinstance(item, dict):
                inner += [v for v in item.values() if isinstance(v, dict | list)]
            elif isinstance(item, list):
                inner += [v for v in item if isinstance(v, dict | list)]
        level = inner
        left -= 1
    return left if not level else 0


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes} bytes", code="body_too_large")


__all__ = ["ClientDisconnect", "describe", "parse_json", "read_body", "read_model"]
