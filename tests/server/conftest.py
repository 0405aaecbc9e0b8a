from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from minisgl.message.folder import SocketFolder
from minisgl.workers.contract import Endpoints
from minisgl_server.engine_client import EngineClient, EngineFacts
from minisgl_server.metrics import Metrics
from minisgl_server.settings import ServerSettings
from minisgl_server.state import ServerState
from tests.server.pace import pace_env
from tests.server.server_process import ServerProcess
from tests.tiny_models import TinyModel, save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "tiny"
    save_tiny_model(folder, TinyModel(vocab_size=320, max_positions=2048))
    return folder


@pytest.fixture(scope="session")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server that all tests share which do it no harm."""
    folder = tmp_path_factory.mktemp("server")
    flags = ("--max-prompts=8", "--max-choices=4", "--max-body-size=256KiB", "--num-pages=512")
    with ServerProcess(tiny_model, folder, "--log-level=debug", *flags) as process:
        yield process.wait_until_ready()


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="session")
def paced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a server whose answers last until a test has done what it wants."""
    return pace_env(tmp_path_factory.mktemp("pace"))


@pytest.fixture(scope="session")
def slow_server(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, paced: dict[str, str]
) -> Iterator[ServerProcess]:
    """One such server, which all tests share that leave or stop answers."""
    folder = tmp_path_factory.mktemp("slow-server")
    with ServerProcess(tiny_model, folder, "--num-pages=512", **paced) as process:
        yield process.wait_until_ready()


@pytest.fixture
def idle_state() -> Iterator[ServerState]:
    """Of a server whose workers were never started."""
    facts, metrics = EngineFacts("m", "cpu", 8, 1, 8, 1, 1), Metrics()
    with SocketFolder() as folder:
        client = EngineClient(Endpoints(folder.path, 0), metrics)
        settings = ServerSettings.model_validate({})
        yield ServerState(settings, client, facts, metrics, ("m",), {}, None, 0)
        client.close()
