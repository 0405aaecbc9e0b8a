"""Links between pages, into the code and to headings lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.site.surface import read_module
from tests.docs.doc_blocks import BLOCK, DOCUMENTS
from tests.packaging.workspace import ROOT

LINK = re.compile(r"\[([^\]]*)\]\((?![a-z]+:)([^)\s]*)\)")
NAMED = re.compile(r"`([A-Za-z_][\w.]*)`")

every_document = pytest.mark.parametrize("document", DOCUMENTS)


def links(document: str) -> list[tuple[str, Path, str]]:
    """Text, file and heading of every relative link of a document."""
    path = ROOT / document
    found = LINK.findall(BLOCK.sub("", path.read_text()))
    parts = [(text, *target.partition("#")[::2]) for text, target in found]
    return [(text, path.parent / file if file else path, heading) for text, file, heading in parts]


@every_document
def test_its_links_lead_to_files(document: str) -> None:
    assert [str(path) for _, path, _ in links(document) if not path.exists()] == []


@every_document
def test_its_links_lead_to_headings(document: str) -> None:
    missing = [
        f"{path}#{heading}"
        for _, path, heading in links(document)
        if heading and heading not in headings(path)
    ]
    assert missing == []


@every_document
def test_what_it_links_to_by_name_is_defined_there(document: str) -> None:
    missing = [
        f"{name} in {path}"
        for text, path, _ in links(document)
        if path.suffix == ".py" and path.exists()
        for name in NAMED.findall(text)
        if "/" not in text and ".py" not in text and not defines(path, name)
    ]
    assert missing == []


def headings(path: Path) -> set[str]:
    """The anchors of a page, as GitHub and MkDocs make them of its headings."""
    titles = re.findall(r"^#+ (.*)$", BLOCK.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def defines(path: Path, name: str) -> bool:
    """Whether a module has a name, or is it: ``control`` of ``control.py``."""
    module = read_module(path.stem, path)
    owner, _, member = name.partition(".")
    found = {each.name: each for each in module.members}
    if owner == path.stem:
        return True
    methods = getattr(found.get(owner), "methods", ())
    return owner in found and (not member or member in {each.name for each in methods})
