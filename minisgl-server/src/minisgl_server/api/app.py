"""The ASGI application: routes, error forms and middleware."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from minisgl_server import __version__
from minisgl_server.api.admin import METRICS_TYPE, AdminRoutes
from minisgl_server.api.completions import CompletionRoutes
from minisgl_server.api.errors import ApiError
from minisgl_server.api.generate import GenerateRoute
from minisgl_server.api.openapi import ERRORS, Described, describe_app
from minisgl_server.api.page import PageRoute
from minisgl_server.api.replies import (
    Aborted,
    ChatCompletion,
    Completion,
    Flushed,
    Health,
    ModelCard,
    ModelList,
    Text,
    Tokens,
    Version,
)
from minisgl_server.api.requests import ClientDisconnect
from minisgl_server.api.schemas import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)
from minisgl_server.api.text_routes import TextRoutes
from minisgl_server.middleware import ApiKeys, RequestIds, RootPath
from minisgl_server.state import ServerState


def create_app(state: ServerState) -> FastAPI:
    """Make the application; ``state`` is what its routes share."""
    settings = state.settings
    app = FastAPI(
        title="minisgl",
        description="OpenAI-compatible API of minisgl.",
        version=__version__,
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
    )
    routes = _routes(state)
    described = {route.path.replace(":path", ""): route.described for route in routes}
    app.openapi = lambda: describe_app(app, described)  # type: ignore[method-assign]  # as FastAPI
    _add_routes(app, routes)
    _add_error_forms(app)
    # The last one added is the outermost.
    if settings.api_key:
        app.add_middleware(ApiKeys, keys=settings.api_key, root_path=settings.root_path)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    if settings.root_path:
        app.add_middleware(RootPath, root_path=settings.root_path)
    app.add_middleware(RequestIds)
    return app


@dataclass(frozen=True, slots=True)
class _Route:
    """One path operation."""

    method: str
    path: str
    endpoint: Callable[..., Any]  # FastAPI reads its signature
    described: Described


def _routes(state: ServerState) -> list[_Route]:
    completions, text, admin = CompletionRoutes(state), TextRoutes(state), AdminRoutes(state)
    generate = GenerateRoute(state).generate
    metrics = Described(text_type=METRICS_TYPE)
    chat = Described(ChatRequest, ChatCompletion, is_stream=True)
    complete = Described(CompletionRequest, Completion, is_stream=True)
    return [
        _Route("POST", "/v1/chat/completions", completions.chat, chat),
        _Route("POST", "/v1/completions", completions.complete, complete),
        _Route("POST", "/tokenize", text.tokenize, Described(TokenizeRequest, Tokens)),
        _Route("POST", "/detokenize", text.detokenize, Described(DetokenizeRequest, Text)),
        _Route("POST", "/generate", generate, Described(GenerateRequest, is_stream=True)),
        _Route("POST", "/abort", admin.abort, Described(AbortRequest, Aborted)),
        _Route("POST", "/flush_cache", admin.flush_cache, Described(reply=Flushed)),
        _Route("GET", "/health", admin.health, Described(reply=Health)),
        _Route("GET", "/version", admin.version, Described(reply=Version)),
        _Route("GET", "/metrics", admin.metrics, metrics),
        _Route("GET", "/v1/models", admin.models, Described(reply=ModelList)),
        _Route("GET", "/v1/models/{model_id:path}", admin.model, Described(reply=ModelCard)),
    ]


def _add_routes(app: FastAPI, routes: Sequence[_Route]) -> None:
    for route in routes:
        app.add_api_route(
            route.path,
            route.endpoint,
            methods=[route.method],
            responses=ERRORS,
            response_model=None,
        )
    app.add_api_route(
        "/", PageRoute().page, methods=["GET"], include_in_schema=False, response_model=None
    )


def _add_error_forms(app: FastAPI) -> None:
    async def on_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError), "it is registered for these"
        return error.response()

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "it is registered for these"
        headers = dict(error.headers) if error.headers else None
        return ApiError(error.status_code, str(error.detail), headers=headers).response()

    async def on_bad_request(request: Request, error: Exception) -> Response:
        return ApiError(400, str(error)).response()

    async def on_disconnect(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    async def on_bug(request: Request, error: Exception) -> Response:
        return ApiError(500, "internal error; the server's log says more").response()

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_bad_request)
    app.add_exception_handler(ClientDisconnect, on_disconnect)
    app.add_exception_handler(Exception, on_bug)
