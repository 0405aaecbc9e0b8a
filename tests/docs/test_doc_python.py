"""Every Python block of the documentation runs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.core.cli.new_plugins import read_report, seeing
from tests.docs.doc_blocks import Block, all_blocks
from tests.docs.doc_commands import URL

NAMES = re.compile(r'"(demo|[\w.-]+/[\w.-]*\d[bB]\b[\w.-]*)"')


def runnable() -> list[object]:
    return [
        pytest.param(
            block,
            id=str(block),
            marks=pytest.mark.skipif(bool(block.skip_reason), reason=block.skip_reason),
        )
        for block in all_blocks("python")
    ]


@pytest.mark.parametrize("block", runnable())
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


@pytest.mark.slow
@pytest.mark.parametrize("block", [b for b in all_blocks("python") if b.suite], ids=str)
def test_a_backend_of_the_documentation_conforms(block: Block, tmp_path: Path) -> None:
    backend, _, left_out = block.suite.partition(" without ")
    kind, _, name = backend.partition(":")
    (tmp_path / "from_the_docs.py").write_text(block.text)
    report = tmp_path / "report.xml"
    flags = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    flags += ["-k", f"not {left_out}"] if left_out else []
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
