from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.server.pace import pace_env, pace_wheel
from tests.tiny_models import TinyModel, save_tiny_model
from tests.tp.rank_pool import RankPool


@pytest.fixture(scope="package")
def pool() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="package")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, TinyModel], Path]:
    """Save a model the first time that its name is asked for."""
    base = tmp_path_factory.mktemp("tp_models")

    def save(name: str, spec: TinyModel) -> Path:
        folder = base / name.replace(" ", "_")
        if not folder.exists():
            save_tiny_model(folder, spec)
        return folder

    return save


@pytest.fixture
def slow_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what an LLM of this process generates last until a test has done what it wants."""
    monkeypatch.syspath_prepend(pace_wheel(tmp_path))


@pytest.fixture
def paced(tmp_path: Path) -> dict[str, str]:
    """The environment of a server with such steps."""
    return pace_env(tmp_path)


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt, which it does not in a job in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
