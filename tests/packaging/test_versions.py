from __future__ import annotations

import re
from importlib.metadata import version

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests.packaging.workspace import ROOT, VERSION, Distribution, distributions

every_distribution = pytest.mark.parametrize("dist", distributions(), ids=str)


@every_distribution
def test_a_distribution_has_the_version_of_the_workspace(dist: Distribution) -> None:
    source = (dist.source / "__init__.py").read_text()
    assert re.findall(r'^__version__ = "(.*)"$', source, re.MULTILINE) == [VERSION]


@every_distribution
def test_the_installed_metadata_is_current(dist: Distribution) -> None:
    assert version(dist.name) == VERSION, "run `make setup` again"


@every_distribution
def test_the_pins_of_siblings_admit_the_version(dist: Distribution) -> None:
    names = {sibling.name for sibling in distributions()}
    siblings = [req for req in dist.requirements if req.name in names]
    release = Version(VERSION)
    pin = f">={release.major}.{release.minor},<{release.major}.{release.minor + 1}"
    assert all(req.specifier == SpecifierSet(pin) for req in siblings), siblings
    assert all(req.specifier.contains(release) for req in siblings)
    assert siblings or dist.name == "minisgl-core", "every plugin needs the core"


@every_distribution
def test_a_distribution_carries_the_licence(dist: Distribution) -> None:
    assert (dist.folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert dist.project["license-files"] == ["LICENSE"]
