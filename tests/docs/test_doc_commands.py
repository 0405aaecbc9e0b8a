"""Every command of the documentation works, and every piece of configuration can be read."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.docs.doc_blocks import (
    DOCUMENTS,
    Block,
    Command,
    all_blocks,
    blocks,
    commands,
    inline_commands,
    written_part,
)
from tests.docs.doc_commands import Shell, clean_environment, subcommand
from tests.packaging.workspace import ROOT, relative

LANGUAGES = {"bash", "json", "python", "text", "toml", "yaml"}
NO_DOCUMENTS = {"build", "changelog.d", "dist", "site"}
RECORDS = "benchmarks/results/"
FENCE = re.compile(r"^[ \t>]*(?:`{3,}|~{3,})", re.MULTILINE)
PLACEHOLDERS = {"KIND", "NAME", "MODEL", "SUBCOMMAND", "FILE"}

every_document = pytest.mark.parametrize("document", DOCUMENTS)


@pytest.fixture
def shell(
    tmp_path: Path,
    documented_model: Path,
    server_url: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
) -> Shell:
    clean_environment(monkeypatch)
    return Shell(tmp_path, documented_model, server_url)


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


def test_blocks_that_are_not_run_are_few_and_say_why() -> None:
    skipped = [each for each in all_blocks("bash", "python") if each.note.startswith("skip")]
    assert [str(each) for each in skipped if len(each.skip_reason) < 10] == []
    assert len(skipped) <= 3


@pytest.mark.parametrize(
    "document", [each for each in DOCUMENTS if any(b.language == "bash" for b in blocks(each))]
)
def test_its_commands_work(document: str, shell: Shell) -> None:
    for block in blocks(document):
        if block.language == "bash" and not block.skip_reason:
            for command in commands(block.text):
                shell.run(command)


@pytest.mark.parametrize("document", [each for each in DOCUMENTS if inline_commands(each)])
def test_commands_in_its_text_work(document: str, shell: Shell) -> None:
    for line in inline_commands(document):
        if not PLACEHOLDERS & set(shlex.split(line)):
            for command in commands(line):
                shell.run(command if takes_arguments(command) else asking_for_help(command))


@pytest.mark.parametrize("block", all_blocks("toml", "yaml", "json"), ids=str)
def test_configuration_can_be_read(block: Block) -> None:
    readers: dict[str, Callable[[str], object]] = {
        "json": json.loads,
        "toml": tomllib.loads,
        "yaml": yaml.safe_load,
    }
    assert readers[block.language](block.text)


def takes_arguments(command: Command) -> bool:
    """Whether a command of the running text is more than the name of a subcommand."""
    program, *words = command.words
    return program != "minisgl" or " ".join(words) != subcommand(words)


def asking_for_help(command: Command) -> Command:
    return replace(command, words=(*command.words, "--help"))
