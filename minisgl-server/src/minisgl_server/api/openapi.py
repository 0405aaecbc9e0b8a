"""The description of the routes at ``/openapi.json``; bodies are read by the routes themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

_REF = "#/components/schemas/{model}"
_EVENT = {
    "description": "Each event: a chunk as JSON (bare text for /generate); the last data is [DONE]",
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string"}},
}

ERRORS: dict[int | str, dict[str, Any]] = {  # as FastAPI takes it
    status: {
        "description": what,
        "content": {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}},
    }
    for status, what in {
        400: "A parameter is wrong",
        401: "A key is needed",
        404: "No such model",
        408: "The body did not arrive in time",
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


@dataclass(frozen=True, slots=True)
class Described:
    """What a route takes and gives; bodies are read and written by the routes themselves.

    Attributes:
        body: JSON that it takes, if any.
        reply: JSON that it gives, if any.
        is_stream: Whether it can give server-sent events.
        text_type: Media type of a text that it gives instead.
    """

    body: type[BaseModel] | None = None
    reply: type[BaseModel] | None = None
    is_stream: bool = False
    text_type: str = ""

    @property
    def models(self) -> list[type[BaseModel]]:
        """Both models, where there are both."""
        return [model for model in (self.body, self.reply) if model is not None]

    def apply(self, operation: dict[str, Any]) -> None:  # JSON
        """Write it into an operation of the document."""
        if self.body is not None:
            content = {"application/json": {"schema": _ref(self.body)}}
            operation["requestBody"] = {"required": True, "content": content}
        answers: dict[str, Any] = {}  # JSON
        if self.reply is not None:
            answers["application/json"] = {"schema": _ref(self.reply)}
        if self.is_stream:
            answers["text/event-stream"] = {"schema": _EVENT}
        if self.text_type:
            answers[self.text_type] = {"schema": {"type": "string"}}
        responses = operation["responses"]
        responses["200"] = {"description": "It was done", "content": answers}
        responses.pop("422", None)  # FastAPI's own; it is a 400 here


def describe_app(app: FastAPI, routes: Mapping[str, Described]) -> dict[str, Any]:  # JSON
    """Return the description, made once and kept by the application.

    Args:
        app: With all routes.
        routes: Of the server itself, by path.
    """
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas["Error"] = _ERROR_SCHEMA
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        for path, described in routes.items():
            for operation in document["paths"][path].values():
                described.apply(operation)
            for model in described.models:
                schema = model.model_json_schema(ref_template=_REF)
                schemas.update(schema.pop("$defs", {}))
                schemas[model.__name__] = schema
        app.openapi_schema = document
    return app.openapi_schema


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}
