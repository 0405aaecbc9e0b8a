"""Wheels built once per session, by way of the sdist."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.packaging.workspace import VERSION, Distribution, distributions

WheelOf = Callable[[Distribution], Path]

GROUPED = [
    pytest.param(dist, id=dist.name, marks=pytest.mark.xdist_group(dist.name))
    for dist in distributions()
]
"""Cases of all distributions; those of one stay in one process, which builds its wheel."""


@pytest.fixture(scope="session")
def wheel_of(tmp_path_factory: pytest.TempPathFactory) -> WheelOf:
    """Build a wheel when it is first asked for."""
    folder = tmp_path_factory.mktemp("dist")

    def build(dist: Distribution) -> Path:
        pattern = f"{dist.name.replace('-', '_')}-{VERSION}-*.whl"
        if not list(folder.glob(pattern)):
            command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
            subprocess.run([*command, str(dist.folder)], check=True, capture_output=True)
        (wheel,) = folder.glob(pattern)
        return wheel

    return build
