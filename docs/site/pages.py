"""Every page of ``docs/`` that is made from the code, as a whole or in part."""

from __future__ import annotations

from collections.abc import Mapping

from docs.site.reference import MODULES, PAGES, expected_page
from minisgl.config.table import render_page, render_table
from minisgl.config.tree import Section, SettingsTree
from minisgl_server.settings import ServerSettings

SERVER_HEAD = """# Settings of the server

Besides those of every command, in [settings.md](settings.md).

"""


def expected_pages() -> Mapping[str, str]:
    """Return what each of the pages should be, by its path below ``docs/``."""
    server = SettingsTree((Section(ServerSettings, commands=("serve",)),))
    pages = {
        "settings.md": render_page(SettingsTree.build()),
        "server-settings.md": SERVER_HEAD + render_table(server).rstrip() + "\n",
    }
    for name in MODULES:
        text = (PAGES / f"{name}.md").read_text()
        pages[f"backends/{name}.md"] = expected_page(name, text)
    return pages


def write_pages() -> None:
    """Write all of them."""
    for name, text in expected_pages().items():
        (PAGES.parent / name).write_text(text)


if __name__ == "__main__":
    write_pages()
