"""Fixtures that put throw-away distributions on the path of this process or of a new one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from minisgl.plugin.manager import PluginManager
from tests.core.plugin.backend_samples import BACKEND_SAMPLES
from tests.core.plugin.hook_samples import HOOK_SAMPLES
from tests.core.plugin.throwaway import install_all

Site = Callable[[str], Path]
Boot = Callable[..., PluginManager]
RunPython = Callable[..., Any]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Install the throw-away distributions once per session; returns the folder of each."""
    # Several folders of tests import this fixture, and each of them counts as one of its own.
    folder = tmp_path_factory.getbasetemp() / "throwaway-distributions"
    if not folder.exists():
        folder.mkdir()
        install_all((*BACKEND_SAMPLES, *HOOK_SAMPLES), folder)
    return folder.joinpath


@pytest.fixture
def boot(site: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[Boot]:
    """Boot a manager in this process that sees the named distributions beside the real ones."""
    before = set(sys.modules)

    def bootstrap(*names: str, plugins: str = "") -> PluginManager:
        for name in names:
            monkeypatch.syspath_prepend(str(site(name)))
        return PluginManager.bootstrap({"MINISGL_PLUGINS": plugins})

    yield bootstrap
    # Each test imports the throw-away modules afresh.
    for name in {name for name in sys.modules if name.startswith("acme_")} - before:
        del sys.modules[name]


@pytest.fixture
def run_python(site: Site, tmp_path: Path) -> RunPython:
    """Run code in a new interpreter that sees the named distributions; returns its JSON output."""

    def run(code: str, *names: str, env: dict[str, str] | None = None) -> Any:  # Any: JSON
        path = os.pathsep.join(str(site(name)) for name in names)
        clean = {key: text for key, text in os.environ.items() if not key.startswith("MINISGL_")}
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env={**clean, "PYTHONPATH": path, **(env or {})},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run
