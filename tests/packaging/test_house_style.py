"""The rules of the house that no linter knows."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.packaging.workspace import (
    ROOT,
    Distribution,
    distributions,
    project_files,
    python_files,
    relative,
)

MAX_LINES = 400
# Built from parts, so that this file names none of them.
REGISTRY_HOSTS = [
    re.escape(".".join(parts))
    for parts in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("pypi", "python", "org"),
        ("npmjs", "org"),
        ("npmjs", "com"),
        ("yarnpkg", "com"),
        ("pypi", "nvidia", "com"),
        ("download", "pytorch", "org"),
    )
]


def test_no_module_is_too_long() -> None:
    lengths = {relative(path): len(path.read_text().splitlines()) for path in python_files()}
    assert {name: n for name, n in lengths.items() if n > MAX_LINES} == {}


def test_the_files_of_the_tests_have_unique_names() -> None:
    names = Counter(
        path.name
        for path in python_files()
        if path.is_relative_to(ROOT / "tests") and path.name not in {"__init__.py", "conftest.py"}
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_package_files_hold_no_logic() -> None:
    inits = [path for path in python_files() if path.name == "__init__.py"]
    lazy = ROOT / "minisgl-core/src/minisgl/__init__.py"  # offers LLM and SamplingParams
    assert [relative(path) for path in inits if path != lazy and has_logic(path)] == []


@pytest.mark.parametrize("dist", distributions(), ids=str)
def test_a_distribution_is_one_package_with_its_papers(dist: Distribution) -> None:
    papers = {"LICENSE", "README.md", "pyproject.toml", "src"}
    assert papers <= {path.name for path in dist.folder.iterdir()}
    assert {path.name for path in (dist.folder / "src").iterdir()} == {dist.package}
    assert (dist.source / "py.typed").is_file()


def test_no_registry_host_is_named() -> None:
    assert lines_with("|".join(REGISTRY_HOSTS)) == []


def test_nothing_depends_on_the_machine_it_was_written_on() -> None:
    places = {str(ROOT), str(ROOT.parent), str(Path.home())}
    deep = [re.escape(place) for place in places if place.count("/") > 1]
    assert lines_with("|".join([*deep, r"(?<![\w./-])/(root|home)/"])) == []


def has_logic(path: Path) -> bool:
    """Whether a package's `__init__.py` has more than a docstring and constants of its own."""
    body = ast.parse(path.read_text()).body
    return not all(is_docstring(node) or is_future(node) or is_dunder(node) for node in body)


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def is_dunder(node: ast.stmt) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else []
    return bool(targets) and all(
        isinstance(target, ast.Name) and target.id.startswith("__") for target in targets
    )


def lines_with(pattern: str) -> list[str]:
    """Where a pattern occurs in the text files of the project."""
    regex = re.compile(pattern)
    found = []
    for path in project_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        lines = enumerate(text.splitlines(), start=1)
        found += [f"{relative(path)}:{number}" for number, line in lines if regex.search(line)]
    return found
