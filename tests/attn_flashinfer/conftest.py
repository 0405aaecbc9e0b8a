from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.install_fakes import FLASHINFER, installed


@pytest.fixture(autouse=True)
def flashinfer_folder(tmp_path: Path) -> Iterator[Path]:
    """The fake FlashInfer, importable and with metadata."""
    with installed(tmp_path / "site", FLASHINFER) as folder:
        yield folder
