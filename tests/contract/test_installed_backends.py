"""Every backend that is installed and works here passes the suite of its kind."""

from __future__ import annotations

import pytest

from minisgl.testing.selection import suite_kinds
from tests.contract.suite_runs import run_suite

pytest_plugins = "pytester"


@pytest.mark.parametrize("kind", suite_kinds())
def test_installed_backends_conform(pytester: pytest.Pytester, kind: str) -> None:
    assert run_suite(pytester, kind) == []
