"""Every backend that is installed and works here passes the suite of its kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.testing.hook_backends import HOOK_KIND
from minisgl.testing.selection import suite_kinds
from tests.contract.suite_runs import run_suite


# The core has no logits processors; those of the tests are in test_logits_processor_suite.py.
@pytest.mark.parametrize("kind", sorted({*suite_kinds()} - {HOOK_KIND}))
def test_installed_backends_conform(tmp_path: Path, kind: str) -> None:
    assert run_suite(tmp_path, kind) == []
