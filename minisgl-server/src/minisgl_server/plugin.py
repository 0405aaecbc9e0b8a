"""What this distribution registers: the subcommand ``serve``."""

from __future__ import annotations

from minisgl.plugin.commands import Subcommand
from minisgl.plugin.hookspecs import hookimpl
from minisgl_server.settings import ServerSettings


@hookimpl
def minisgl_subcommands() -> list[Subcommand]:
    """Offer the server."""
    return [
        Subcommand(
            name="serve",
            summary="serve a model over HTTP, with OpenAI's API",
            run="minisgl_server.serve:run",
            has_settings=True,
            has_model_argument=True,
            sections=(ServerSettings,),
        ),
    ]
