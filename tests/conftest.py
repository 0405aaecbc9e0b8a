"""What holds for all tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A machine that is busy with other things is slow, and no test is about that.
settings.register_profile(
    "minisgl", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("minisgl")


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A folder for sockets, whose paths have a limit that `tmp_path` may be too long for."""
    with tempfile.TemporaryDirectory(prefix="minisgl_test_", dir="/tmp") as folder:
        yield Path(folder)
