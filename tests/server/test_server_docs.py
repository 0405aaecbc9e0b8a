from __future__ import annotations

import re
from pathlib import Path

from minisgl.config.table import render_table
from minisgl.config.tree import Section, SettingsTree
from minisgl_server.api.schemas import ChatRequest, CompletionRequest
from minisgl_server.settings import ServerSettings

DOCS = Path(__file__).parents[2] / "docs"
HEAD = (
    "# Settings of the server\n\nBesides those of every command, in [settings.md](settings.md).\n\n"
)


def page() -> str:
    section = Section(ServerSettings, commands=("serve",))
    return HEAD + render_table(SettingsTree((section,))).rstrip() + "\n"


def test_the_page_of_settings_is_made_from_the_section() -> None:
    assert (DOCS / "server-settings.md").read_text() == page(), (
        'run: python -c "from tests.server.test_server_docs import *; '
        "(DOCS / 'server-settings.md').write_text(page())\""
    )


def test_every_parameter_is_in_the_page_of_the_api() -> None:
    text = (DOCS / "http-api.md").read_text()
    names = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    assert sorted(name for name in names if not re.search(rf"\b{name}\b", text)) == []
