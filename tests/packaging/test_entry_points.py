from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import distribution

import pytest

from tests.packaging.workspace import Distribution, distributions

HEAVY = (
    "torch",
    "triton",
    "flashinfer",
    "flash_attn",
    "transformers",
    "tokenizers",
    "numpy",
    "zmq",
)

LOAD_EVERY_PLUGIN = """
import json, sys
from importlib.metadata import distributions
failures = []
for point in [point for dist in distributions() for point in dist.entry_points]:
    if point.group == "minisgl" or point.group.startswith("minisgl."):
        try:
            point.load()
        except Exception as error:
            failures.append(f"{point.group} {point.name} = {point.value}: {error!r}")
print(json.dumps({"failures": failures, "modules": sorted(sys.modules)}))
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    """What loading every registered plugin does to a fresh interpreter."""
    run = [sys.executable, "-c", LOAD_EVERY_PLUGIN]
    report = subprocess.run(run, check=True, capture_output=True, text=True).stdout
    result: dict[str, list[str]] = json.loads(report)
    return result


@pytest.mark.parametrize("dist", distributions(), ids=str)
def test_the_installed_entry_points_are_current(dist: Distribution) -> None:
    installed = {(p.group, p.name, p.value) for p in distribution(dist.name).entry_points}
    assert installed == dist.entry_points, "run `make setup` again"


def test_every_registered_plugin_exists(loaded: dict[str, list[str]]) -> None:
    assert loaded["failures"] == []


@pytest.mark.parametrize("library", HEAVY)
def test_discovery_leaves_heavy_libraries_out(loaded: dict[str, list[str]], library: str) -> None:
    assert library not in loaded["modules"]


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import sys; old = set(sys.modules); import minisgl; print(*set(sys.modules) - old)"
    run = [sys.executable, "-c", code]
    new = subprocess.run(run, check=True, capture_output=True, text=True).stdout.split()
    assert [name for name in new if name.startswith("minisgl.") or name in HEAVY] == []
