from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fakes.install_fakes import flash_attention, installed

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install fakes of some generations, and pretend to have a GPU."""
    with ExitStack() as stack:

        def run(*versions: str, sm: int = 90) -> Path:
            folder = stack.enter_context(installed(tmp_path, flash_attention(*versions)))
            monkeypatch.setattr("minisgl_attn_fa.backend.compute_capability", lambda device: sm)
            return folder

        yield run
