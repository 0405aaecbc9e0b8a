"""The long commands of the documentation, run for real: install, test, and serve the real model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.doc_blocks import blocks, commands
from tests.docs.doc_commands import clean_environment
from tests.docs.real_shell import RealShell

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("document", "num_servers"), [("README.md", 1), ("docs/index.md", 1), ("docs/plugins.md", 1)]
)
def test_a_page_can_be_followed_as_it_is_written(
    document: str,
    num_servers: int,
    tmp_path: Path,
    documented_model: Path,
    server_url: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clean_environment(monkeypatch)
    folder, site = tmp_path / "work", tmp_path / "site"
    folder.mkdir()
    shell = RealShell(folder, documented_model, server_url, site=site)
    for block in blocks(document):
        if block.language == "bash" and not block.skip_reason:
            for command in commands(block.text):
                shell.run(command)
    assert len(shell.served) == num_servers
