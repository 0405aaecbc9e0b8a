"""The description of the routes at ``/openapi.json``; bodies are read by the routes themselves."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from minisgl_server.api.schemas import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)

_REF = "#/components/schemas/{model}"
_MODELS = (
    AbortRequest, ChatRequest, CompletionRequest, DetokenizeRequest, GenerateRequest,
    TokenizeRequest,
)  # fmt: skip

ERRORS: dict[int | str, dict[str, Any]] = {  # as FastAPI takes it
    status: {
        "description": what,
        "content": {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}},
    }
    for status, what in {
        400: "A parameter is wrong",
        401: "A key is needed",
        404: "No such model",
        413: "The body is too large",
        500: "The engine failed",
        503: "Too many requests wait, or the engine is gone",
    }.items()
}
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """Describe a route's body, for ``openapi_extra``."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe_app(app: FastAPI) -> dict[str, Any]:  # JSON
    """Return the description, made once and kept by the application."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas["Error"] = _ERROR_SCHEMA
        for model in _MODELS:
            schema = model.model_json_schema(ref_template=_REF)
            schemas.update(schema.pop("$defs", {}))
            schemas[model.__name__] = schema
        app.openapi_schema = document
    return app.openapi_schema
