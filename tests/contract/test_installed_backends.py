"""Every backend that is installed and works here passes the suite of its kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.testing.selection import suite_kinds
from tests.contract.suite_runs import run_suite


@pytest.mark.parametrize("kind", suite_kinds())
def test_installed_backends_conform(tmp_path: Path, kind: str) -> None:
    assert run_suite(tmp_path, kind) == []
