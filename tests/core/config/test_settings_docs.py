from __future__ import annotations

from pathlib import Path

from minisgl.config.table import render_page
from minisgl.config.tree import SettingsTree
from minisgl.plugin import hookspecs

DOCS = Path(__file__).parents[3] / "docs"

WRITE = "from minisgl.config.table import *; print(render_page(SettingsTree.build()), end='')"


def test_the_settings_page_is_made_from_the_tree() -> None:
    is_current = (DOCS / "settings.md").read_text() == render_page(SettingsTree.build())
    assert is_current, f'run: python -c "{WRITE}" > docs/settings.md'


def test_every_hook_is_in_the_plugins_page() -> None:
    page = (DOCS / "plugins.md").read_text()
    names = [name for name in dir(hookspecs) if name.startswith("minisgl_")]
    assert [name for name in names if f"| `{name}(" not in page] == []
