"""The site: what is made from the code is current, and every page is reached."""

from __future__ import annotations

import re

import pytest
import yaml

from docs.site.docstrings import attributes, to_markdown
from docs.site.pages import expected_pages
from docs.site.reference import MODULES
from minisgl.plugin.discovery import KINDS
from tests.packaging.workspace import ROOT

DOCS = ROOT / "docs"
NAV = re.compile(r"^ *- .*: (\S+\.md)$", re.MULTILINE)


@pytest.mark.parametrize("page", ["settings.md", "server-settings.md"])
def test_a_page_of_settings_is_current(page: str) -> None:
    is_current = (DOCS / page).read_text() == expected_pages()[page]
    assert is_current, f"docs/{page} is older than the code: run `make pages`"


@pytest.mark.parametrize("name", MODULES)
def test_a_reference_is_current(name: str) -> None:
    page = f"backends/{name}.md"
    is_current = (DOCS / page).read_text() == expected_pages()[page]
    assert is_current, f"docs/{page} is older than the code: run `make pages`"


def test_every_kind_has_a_page() -> None:
    assert set(KINDS) <= set(MODULES)


def test_every_page_is_in_the_navigation() -> None:
    listed = NAV.findall((DOCS / "site" / "mkdocs.yml").read_text())
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert sorted(listed) == sorted(pages)


def test_the_site_fetches_nothing_from_elsewhere() -> None:
    site = yaml.safe_load((DOCS / "site" / "mkdocs.yml").read_text())
    assert site["theme"]["font"] is False
    assert not {"extra_javascript", "extra_css"} & set(site)


DOCSTRING = """Do one thing.

It is like this::

    do(1)

Args:
    x: ``[n]`` numbers,
        in order.
    y: Others.

Returns:
    A number.

Raises:
    ValueError: It cannot.

Attributes:
    size: How many.
"""


def test_a_docstring_becomes_markdown() -> None:
    assert to_markdown(DOCSTRING) == (
        "Do one thing.\n\nIt is like this:\n\n~~~~python\ndo(1)\n~~~~\n\n"
        "**Args**\n\n- `x`: `[n]` numbers, in order.\n- `y`: Others.\n\n"
        "**Returns** A number.\n\n**Raises**\n\n- `ValueError`: It cannot."
    )
    assert attributes(DOCSTRING) == {"size": "How many."}
