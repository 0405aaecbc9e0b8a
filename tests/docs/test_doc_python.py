"""Every Python block of the documentation runs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from docs.site.reference import MARK
from tests.core.cli.new_plugins import read_report, seeing
from tests.docs.doc_blocks import DOCUMENTS, Block, all_blocks
from tests.docs.doc_commands import URL
from tests.packaging.workspace import ROOT

EXAMPLE = re.compile(r"^~~~~python\n(.*?)^~~~~$", re.MULTILINE | re.DOTALL)
NAMES = re.compile(r'"(demo|[\w.-]+/[\w.-]*\d[bB]\b[\w.-]*)"')


@pytest.mark.parametrize("block", all_blocks("python"), ids=str)
def test_it_runs(
    block: Block,
    documented_model: Path,
    server_url: Callable[[], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    text = NAMES.sub(f'"{documented_model}"', block.text)
    if URL in text:
        text = text.replace(URL, server_url())
    exec(compile(text, str(block), "exec"), {"__name__": "__main__"})


def reference_examples() -> list[tuple[str, str]]:
    """Page and text of every example in docstrings; declarations import nothing."""
    return [
        (document, text)
        for document in DOCUMENTS
        for text in EXAMPLE.findall((ROOT / document).read_text().partition(MARK)[2])
        if re.search(r"^(from|import) ", text, re.MULTILINE)
    ]


def test_examples_of_the_reference_run() -> None:
    found = reference_examples()
    assert "docs/backends/hooks.md" in {document for document, _ in found}
    for document, text in found:
        exec(compile(text, document, "exec"), {"__name__": "__main__"})


@pytest.mark.slow
@pytest.mark.parametrize("block", [b for b in all_blocks("python") if b.suite], ids=str)
def test_a_backend_of_the_documentation_conforms(block: Block, tmp_path: Path) -> None:
    kind, _, name = block.suite.partition(":")
    (tmp_path / "from_the_docs.py").write_text(block.text)
    report = tmp_path / "report.xml"
    flags = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    tested = f"--backend={kind}:from_the_docs:{name}"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *flags, "--pyargs", "minisgl.testing", tested],
        cwd=tmp_path,
        env=seeing(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert any(not outcome.is_skipped for outcome in read_report(report))
