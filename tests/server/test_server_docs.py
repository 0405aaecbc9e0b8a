from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from pydantic import BaseModel

from minisgl_server.api.schemas import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)
from minisgl_server.metrics import Metrics

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("abort", AbortRequest),
        ("chat-completions", ChatRequest),
        ("completions", CompletionRequest),
        ("detokenize", DetokenizeRequest),
        ("generate", GenerateRequest),
        ("tokenize", TokenizeRequest),
    ],
)
def test_every_parameter_is_in_the_page_of_its_endpoint(name: str, model: type[BaseModel]) -> None:
    text = (DOCS / "http-api" / f"{name}.md").read_text()
    missing = [field for field in model.model_fields if not re.search(rf"\b{field}\b", text)]
    assert missing == []


def test_every_endpoint_has_a_page(http: httpx.Client) -> None:
    pages = "\n".join(path.read_text() for path in (DOCS / "http-api").glob("*.md"))
    paths = [
        path.replace("{model_id}", "{id}") for path in http.get("/openapi.json").json()["paths"]
    ]
    assert [
        path
        for path in [*paths, "/"]
        if f"`GET {path}`" not in pages and f"`POST {path}`" not in pages
    ] == []


def test_every_metric_is_in_its_page() -> None:
    text = (DOCS / "http-api" / "metrics.md").read_text()
    rendered = Metrics().render().decode()
    names = set(re.findall(r"^# TYPE minisgl:(\w+?)(?:_total)? ", rendered, re.MULTILINE))
    missing = [n for n in names if not n.endswith("_created") and n not in text]
    assert missing == []
