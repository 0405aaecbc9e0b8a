"""The official client of the npm registry."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.idle import becomes_idle
from tests.server.server_process import ServerProcess

pytestmark = [
    pytest.mark.npm,
    pytest.mark.skipif(shutil.which("npm") is None, reason="needs node and npm"),
]

SOURCES = Path(__file__).parent / "npm"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("npm")
    for name in ("package.json", "check.mjs"):
        shutil.copy(SOURCES / name, folder)
    quiet = ["--no-audit", "--no-fund", "--no-package-lock", "--silent"]
    subprocess.run(["npm", "install", *quiet], cwd=folder, check=True, timeout=300)
    return folder


def test_the_npm_client_gets_all_it_asks_for(
    server: ServerProcess, http: httpx.Client, folder: Path
) -> None:
    run = subprocess.run(
        ["node", "check.mjs", f"{server.url}/v1"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    told: dict[str, Any] = json.loads(run.stdout)  # JSON
    assert told["models"] == [card["id"] for card in http.get("/v1/models").json()["data"]]
    assert told["whole"] == told["streamed"] == told["helper"]
    assert told["usage"]["completion_tokens"] == told["logprobs"] or told["reason"] == "stop"
    assert told["plain"] == [0, 1]
    assert told["together"] == 8
    assert told["error"] == {"name": "BadRequestError", "status": 400, "param": "temperature"}
    assert told["requestId"]
    assert becomes_idle(http)
