from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

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
