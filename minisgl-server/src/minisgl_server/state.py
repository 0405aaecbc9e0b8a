"""What all routes of one server share."""

from __future__ import annotations

from dataclasses import dataclass, field

from minisgl_server.call import Call
from minisgl_server.engine_client import EngineClient, EngineFacts
from minisgl_server.metrics import Metrics
from minisgl_server.settings import ServerSettings


@dataclass(slots=True)
class ServerState:
    """One server; `calls` is changed by the routes.

    Attributes:
        settings: Of the server.
        client: The line to the workers.
        facts: What the engine is.
        metrics: Of the server.
        names: What clients call the model; the first is used in answers.
        versions: Versions of the installed distributions.
        chat_template: Used in place of the model's.
        created: When the server started, in seconds of Unix time.
        calls: Answers that are being made, by their id.
    """

    settings: ServerSettings
    client: EngineClient
    facts: EngineFacts
    metrics: Metrics
    names: tuple[str, ...]
    versions: dict[str, str]
    chat_template: str | None
    created: int
    calls: dict[str, Call] = field(default_factory=dict)
