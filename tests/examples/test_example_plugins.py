"""The third-party distributions in examples/plugins: they install, pass their tests and obey."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tests.core.cli.new_plugins import (
    Outcome,
    imported_modules,
    install,
    run_tests,
    seeing,
    type_complaints,
)
from tests.packaging.test_import_rules import HEAVY, is_public
from tests.packaging.workspace import ROOT, Distribution

EXAMPLES = tuple(
    Distribution(path.parent) for path in sorted(ROOT.glob("examples/plugins/*/pyproject.toml"))
)
PICKED = {
    "minisgl-attn-sdpa": ("attention", "sdpa"),
    "minisgl-cache-s3fifo": ("cache", "s3fifo"),
    "minisgl-model-gemma3": ("model", "Gemma3ForCausalLM"),
}

every_example = pytest.mark.parametrize("dist", EXAMPLES, ids=str)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all of them are installed."""
    return install([dist.folder for dist in EXAMPLES], tmp_path_factory.mktemp("site"))


def test_each_example_is_known_here() -> None:
    assert [dist.name for dist in EXAMPLES] == list(PICKED)


@pytest.fixture(scope="module")
def own_tests(target: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    """How the tests of all of them end, in one run."""
    root = EXAMPLES[0].folder.parent  # so that a test's name begins with its distribution's
    tests = [str(dist.folder / "tests") for dist in EXAMPLES]
    return run_tests(target, tmp_path_factory.mktemp("run"), "--rootdir", str(root), *tests)


@every_example
def test_its_own_tests_pass(dist: Distribution, own_tests: list[Outcome]) -> None:
    mine = [outcome for outcome in own_tests if outcome.name.startswith(dist.name)]
    assert mine, "no test of it ran"
    assert [each for each in mine if each.failure or each.is_skipped] == []


def test_all_of_them_are_listed_as_working(target: Path) -> None:
    command = [sys.executable, "-m", "minisgl", "plugins", "--json", "--device", "cpu"]
    run = subprocess.run(command, env=seeing(target), capture_output=True, text=True, check=True)
    rows = json.loads(run.stdout)["backends"]
    works = {row["distribution"]: (row["kind"], row["name"]) for row in rows if row["is_available"]}
    assert {name: works[name] for name in PICKED} == PICKED


def test_all_of_them_are_strictly_typed(tmp_path: Path) -> None:
    assert type_complaints([dist.folder for dist in EXAMPLES], tmp_path) == ""


@every_example
def test_it_imports_public_modules_and_what_it_declares(dist: Distribution) -> None:
    found = {name for path in dist.source.rglob("*.py") for name in imported_modules(path)}
    core = {name for name in found if name.split(".")[0] == "minisgl"}
    assert {name for name in core if not is_public(name)} == set()
    declared = {canonicalize_name(req.name) for req in dist.requirements}
    assert "minisgl-core" in declared
    owners = packages_distributions()
    known = {"minisgl", dist.package, *sys.stdlib_module_names}
    others = {name.split(".")[0] for name in found} - known
    undeclared = {
        name
        for name in others
        if not declared & {canonicalize_name(each) for each in owners.get(name, [name])}
    }
    assert undeclared == set()


@every_example
def test_its_light_modules_import_no_heavy_library(dist: Distribution) -> None:
    light = [dist.source / name for name in ("plugin.py", "settings.py", "config_json.py")]
    found = {name for path in light if path.exists() for name in imported_modules(path)}
    assert {name for name in found if name.split(".")[0] in HEAVY} == set()


@every_example
def test_it_has_its_papers(dist: Distribution) -> None:
    assert {"LICENSE", "README.md", "pyproject.toml", "src", "tests"} <= {
        path.name for path in dist.folder.iterdir()
    }
    assert (dist.source / "py.typed").is_file()
    assert (dist.folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
