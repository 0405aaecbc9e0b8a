"""The ASGI application: routes, error forms and middleware."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from minisgl_server import __version__
from minisgl_server.api.admin import AdminRoutes
from minisgl_server.api.completions import CompletionRoutes
from minisgl_server.api.errors import ApiError
from minisgl_server.api.generate import GenerateRoute
from minisgl_server.api.openapi import ERRORS, body_of, describe_app
from minisgl_server.api.page import PageRoute
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

logger = logging.getLogger(__name__)


def create_app(state: ServerState, extra_routes: Sequence[object] = ()) -> FastAPI:
    """Make the application.

    Args:
        state: What the routes share.
        extra_routes: Of plugins; the server's own come first.
    """
    settings = state.settings
    app = FastAPI(
        title="minisgl",
        description="OpenAI-compatible API of minisgl.",
        version=__version__,
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
    )
    app.openapi = lambda: describe_app(app)  # type: ignore[method-assign]  # FastAPI's own way
    _add_routes(app, state)
    for route in extra_routes:
        if isinstance(route, BaseRoute):
            app.router.routes.append(route)
        else:
            logger.warning("a plugin's route %r is not one of Starlette's and is left out", route)
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


def _add_routes(app: FastAPI, state: ServerState) -> None:
    completions, text, admin = CompletionRoutes(state), TextRoutes(state), AdminRoutes(state)
    generate = GenerateRoute(state)
    posts = (
        ("/v1/chat/completions", completions.chat, ChatRequest),
        ("/v1/completions", completions.complete, CompletionRequest),
        ("/tokenize", text.tokenize, TokenizeRequest),
        ("/detokenize", text.detokenize, DetokenizeRequest),
        ("/generate", generate.generate, GenerateRequest),
        ("/abort", admin.abort, AbortRequest),
    )
    for path, endpoint, model in posts:
        app.add_api_route(
            path,
            endpoint,
            methods=["POST"],
            responses=ERRORS,
            openapi_extra=body_of(model),
            response_model=None,
        )
    app.add_api_route(
        "/flush_cache", admin.flush_cache, methods=["POST"], responses=ERRORS, response_model=None
    )
    gets = (
        ("/health", admin.health),
        ("/version", admin.version),
        ("/metrics", admin.metrics),
        ("/v1/models", admin.models),
        ("/v1/models/{model_id:path}", admin.model),
    )
    app.add_api_route(
        "/", PageRoute().page, methods=["GET"], include_in_schema=False, response_model=None
    )
    for path, reader in gets:
        app.add_api_route(path, reader, methods=["GET"], responses=ERRORS, response_model=None)


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
