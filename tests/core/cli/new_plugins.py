"""Plugins of every kind as `minisgl plugins new` writes them, and runs of their own tests."""

from __future__ import annotations

import ast
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from minisgl.cli.main import main
from minisgl.cli.plugin_kinds import PLUGIN_KINDS
from tests.packaging.test_import_rules import imported_names
from tests.packaging.workspace import ROOT

NAMES = {kind: f"my-{kind.replace('_', '-')}" for kind in PLUGIN_KINDS} | {
    "model": "MyModelForCausalLM"
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one test of a run ended.

    Attributes:
        name: Its place and name.
        failure: What it says; empty when it passed or was skipped.
        is_skipped: Whether it was skipped.
    """

    name: str
    failure: str
    is_skipped: bool


def write_plugin(folder: Path, kind: str, name: str, *flags: str) -> Path:
    """Write one plugin; returns its folder."""
    before = set(folder.iterdir()) if folder.exists() else set()
    assert main(["plugins", "new", kind, name, "--dir", str(folder), *flags]) == 0
    (made,) = set(folder.iterdir()) - before
    return made


def install(folders: Sequence[Path], target: Path) -> Path:
    """Install distributions beside each other, without what they require; returns ``target``."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    flags = ["--no-deps", "--no-index", "--no-build-isolation", "--target", str(target)]
    subprocess.run([*pip, *flags, *map(str, folders)], check=True)
    return target


def seeing(target: Path) -> dict[str, str]:
    """Return an environment in which what is installed in ``target`` is found."""
    clean = {key: text for key, text in os.environ.items() if not key.startswith("MINISGL_")}
    return clean | {"PYTHONPATH": str(target), "OMP_NUM_THREADS": "1"}


def run_tests(target: Path, folder: Path, *args: str) -> list[Outcome]:
    """Run pytest away from this repository's settings.

    Args:
        target: What is installed beside the environment of this process.
        folder: An empty one to run in.
        args: Of pytest.
    """
    report = folder / "report.xml"
    (folder / "pytest.ini").write_text("[pytest]\n")
    flags = ["-q", "-p", "no:cacheprovider", "-c", str(folder / "pytest.ini")]
    flags += ["--import-mode=importlib", f"--junitxml={report}"]
    command = [sys.executable, "-m", "pytest", *flags, *args]
    run = subprocess.run(
        command, cwd=folder, env=seeing(target), capture_output=True, text=True, check=False
    )
    assert run.returncode in (0, 1), run.stdout + run.stderr
    return list(read_report(report))


def type_complaints(folders: Sequence[Path], flat: Path) -> str:
    """Return what mypy says against distributions and their tests; nothing if all is well.

    Args:
        folders: Of distributions.
        flat: An empty folder for copies of the tests, whose names occur twice.
    """
    for folder in folders:
        for path in (folder / "tests").glob("test_*.py"):
            shutil.copy(path, flat / f"{folder.name.replace('-', '_')}_{path.name}")
    sources = [str(path) for folder in folders for path in (folder / "src").iterdir()]
    # The settings and what is cached of this repository: its core and torch need no second look.
    mypy = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    mypy += ["--cache-dir", str(copy_type_cache(flat / ".mypy_cache"))]
    search_path = os.pathsep.join(str(folder / "src") for folder in folders)
    run = subprocess.run(
        [*mypy, "--strict", *sources, *map(str, flat.glob("*.py"))],
        cwd=ROOT,
        env=os.environ | {"MYPYPATH": search_path},
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if run.returncode == 0 else run.stdout + run.stderr


def copy_type_cache(folder: Path) -> Path:
    """Copy what mypy keeps of this repository, and return the folder.

    Of two runs of mypy with one cache the second waits minutes for its locks. The databases are
    copied as they stand, whoever writes to them.
    """
    cache = ROOT / ".mypy_cache"
    for path in cache.rglob("*.db"):
        copied = folder / path.relative_to(cache)
        copied.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copied)) as target:
            source.backup(target)
    return folder


def read_report(report: Path) -> Iterator[Outcome]:
    for case in ElementTree.parse(report).iter("testcase"):
        problems = [each for each in case if each.tag in ("failure", "error")]
        yield Outcome(
            name=f"{case.get('classname')}::{case.get('name')}",
            failure="\n".join(each.text or "" for each in problems),
            is_skipped=case.find("skipped") is not None,
        )


def imported_modules(path: Path) -> set[str]:
    """Return every module that a file imports."""
    nodes = ast.walk(ast.parse(path.read_text()))
    imports = (node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))
    return {name for node in imports for name in imported_names(node)}
