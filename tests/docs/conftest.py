from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from tests.server.server_process import ServerProcess
from tests.tiny_models import TinyModel, save_tiny_model


@pytest.fixture(scope="session")
def documented_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that stands for those of the documentation."""
    folder = tmp_path_factory.mktemp("documented") / "tiny-1B"
    save_tiny_model(folder, TinyModel(vocab_size=320, max_positions=2048))
    return folder


@pytest.fixture(scope="session")
def server_url(
    documented_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], str]]:
    """Starts a server when it is first asked for, and says where it is."""
    with ExitStack() as stack:

        @cache
        def url() -> str:
            folder = tmp_path_factory.mktemp("documented_server")
            server = ServerProcess(documented_model, folder, "--num-pages=512")
            return stack.enter_context(server).wait_until_ready().url

        yield url
