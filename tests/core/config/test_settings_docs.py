from __future__ import annotations

from pathlib import Path

from minisgl.plugin import hookspecs

DOCS = Path(__file__).parents[3] / "docs"


def test_every_hook_is_in_the_plugins_page() -> None:
    page = (DOCS / "plugins.md").read_text()
    names = [name for name in dir(hookspecs) if name.startswith("minisgl_")]
    assert [name for name in names if f"| `{name}(" not in page] == []
