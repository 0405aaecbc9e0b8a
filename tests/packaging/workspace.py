"""What the packaging tests know about the workspace: its folders, files and distributions."""

from __future__ import annotations

import subprocess
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
VERSION = (ROOT / "VERSION").read_text().strip()


@dataclass(frozen=True, slots=True)
class Distribution:
    """One `minisgl-*/` folder."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def package(self) -> str:
        """The import name: the folder's, but for the core."""
        return "minisgl" if self.name == "minisgl-core" else self.name.replace("-", "_")

    @property
    def source(self) -> Path:
        return self.folder / "src" / self.package

    @property
    def project(self) -> dict[str, Any]:  # Any: parsed TOML
        with (self.folder / "pyproject.toml").open("rb") as file:
            project: dict[str, Any] = tomllib.load(file)["project"]  # Any: parsed TOML
        return project

    @property
    def requirements(self) -> list[Requirement]:
        """What it depends on, its extras included."""
        extras = self.project.get("optional-dependencies", {}).values()
        lists = [self.project.get("dependencies", []), *extras]
        return [Requirement(text) for texts in lists for text in texts]

    @property
    def entry_points(self) -> set[tuple[str, str, str]]:
        """Group, name and value of each entry point, scripts included."""
        groups = dict(self.project.get("entry-points", {}))
        groups["console_scripts"] = self.project.get("scripts", {})
        return {(group, n, v) for group, names in groups.items() for n, v in names.items()}

    def __str__(self) -> str:
        return self.name


@cache
def distributions() -> tuple[Distribution, ...]:
    """Every distribution of the workspace, by name."""
    return tuple(
        Distribution(path.parent) for path in sorted(ROOT.glob("minisgl-*/pyproject.toml"))
    )


@cache
def project_files() -> tuple[Path, ...]:
    """Every file that is, or would be, under version control."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    paths = (ROOT / name for name in listing.split("\0") if name)
    return tuple(path for path in paths if path.is_file())


@cache
def python_files() -> tuple[Path, ...]:
    """Every Python file of the project."""
    return tuple(path for path in project_files() if path.suffix == ".py")


def relative(path: Path) -> str:
    """The path as the reader of a failure wants to see it."""
    return path.relative_to(ROOT).as_posix()
