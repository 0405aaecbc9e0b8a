"""Errors as clients of OpenAI's API know them."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        """Make an error.

        Args:
            status: HTTP status.
            message: For people.
            param: Name of the parameter that is wrong.
            code: For programs.
            headers: Of the response.
        """
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:  # JSON
        """Return the error object."""
        return {
            "error": {
                "message": str(self),
                "type": _TYPES.get(self.status, "server_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        """Return the whole answer."""
        return JSONResponse(self.body(), self.status, headers=self.headers)


def overloaded(message: str) -> ApiError:
    """Too many requests wait."""
    return ApiError(503, message, code="overloaded", headers={"Retry-After": "1"})


def unavailable(message: str) -> ApiError:
    """The engine is gone."""
    return ApiError(503, message, code="engine_unavailable")
