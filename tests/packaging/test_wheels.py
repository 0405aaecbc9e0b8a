"""Each wheel as its users get it: built from its sdist."""

from __future__ import annotations

import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from tests.packaging.wheel_builds import GROUPED, WheelOf
from tests.packaging.workspace import VERSION, Distribution, project_files

pytestmark = pytest.mark.slow

every_distribution = pytest.mark.parametrize("dist", GROUPED)


@every_distribution
def test_a_wheel_is_complete(dist: Distribution, wheel_of: WheelOf) -> None:
    with zipfile.ZipFile(wheel_of(dist)) as archive:
        names = set(archive.namelist())
    info = f"{dist.name.replace('-', '_')}-{VERSION}.dist-info"
    assert {f"{dist.package}/py.typed", f"{info}/licenses/LICENSE"} <= names
    assert {name.split("/")[0] for name in names} == {dist.package, info}
    sources = [path for path in project_files() if path.is_relative_to(dist.source)]
    assert {path.relative_to(dist.source.parent).as_posix() for path in sources} <= names


@every_distribution
def test_the_metadata_of_a_wheel_is_sound(dist: Distribution, wheel_of: WheelOf) -> None:
    metadata = read_metadata(wheel_of(dist))
    assert metadata["Name"] == dist.name
    assert metadata["Version"] == VERSION
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Summary"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload(), "the README is missing"


def read_metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())
