"""Every command of the documentation works."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.doc_blocks import (
    BLOCK,
    DOCUMENTS,
    all_blocks,
    blocks,
    commands,
    page_commands,
    written_part,
)
from tests.docs.doc_commands import Shell, clean_environment
from tests.docs.stand_ins import ADDED, PLACEHOLDERS
from tests.packaging.workspace import ROOT, relative

LANGUAGES = {"bash", "python", "text", "toml"}
"""For all but text there is a test that uses the block."""

NO_DOCUMENTS = {"build", "changelog.d", "dist", "site"}
RECORDS = "benchmarks/results/"
GAPS = re.compile(r"`(?:minisgl|pytest|python|make|pip|curl) [^`]*[<…][^`]*`")
FENCE = re.compile(r"^[ \t>]*(?:`{3,}|~{3,})", re.MULTILINE)

every_document = pytest.mark.parametrize("document", DOCUMENTS)


@pytest.fixture
def shell(
    tmp_path: Path,
    documented_model: Path,
    server_url: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
) -> Shell:
    clean_environment(monkeypatch)
    folder = tmp_path / "work"
    folder.mkdir()
    return Shell(folder, documented_model, server_url)


def test_every_document_is_read() -> None:
    """Records of what was done, and what goes into the changelog, tell nobody what to do."""
    found = set(ROOT.glob("*.md"))
    for folder in ROOT.iterdir():
        if folder.is_dir() and not folder.name.startswith(".") and folder.name not in NO_DOCUMENTS:
            found |= {path for path in folder.rglob("*.md") if ".venv" not in path.parts}
    unread = {relative(path) for path in found} - set(DOCUMENTS) - {"CHANGELOG.md"}
    assert sorted(each for each in unread if not each.startswith(RECORDS)) == []


@every_document
def test_no_fence_is_overlooked(document: str) -> None:
    text = written_part(document)
    assert len(FENCE.findall(text)) == 2 * len(blocks(document)), "a fence begins its line"


@every_document
def test_every_block_says_its_language(document: str) -> None:
    assert [str(each) for each in blocks(document) if each.language not in LANGUAGES] == []


def test_a_note_on_a_block_leaves_none_out() -> None:
    notes = [each.note for each in all_blocks("bash", "python", "toml") if each.note]
    assert [note for note in notes if not note.startswith("suite: ")] == []


@pytest.mark.parametrize("document", [each for each in DOCUMENTS if page_commands(each)])
def test_its_quick_commands_work(document: str, shell: Shell) -> None:
    """What it does not run, it checks: `test_doc_for_real` runs those pages as a whole."""
    for command in page_commands(document):
        shell.run(command)


@every_document
def test_no_command_of_its_text_has_gaps(document: str) -> None:
    assert GAPS.findall(BLOCK.sub("", written_part(document))) == [], "it cannot be run"


def test_every_stand_in_is_for_something_documented() -> None:
    documented = [command for document in DOCUMENTS for command in page_commands(document)]
    words = {word for command in documented for word in command.words}
    assert set(PLACEHOLDERS) - words == set()
    assert [each for each in ADDED if not any(str(c).startswith(each) for c in documented)] == []


def test_a_command_that_a_comment_offers_is_one() -> None:
    found = list(commands("pip install a  # also: minisgl serve --model M, python -m minisgl b\n"))
    assert [str(each) for each in found] == [
        "pip install a",
        "minisgl serve --model M",
        "python -m minisgl b",
    ]
