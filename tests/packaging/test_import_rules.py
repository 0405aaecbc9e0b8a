"""Plugins see the core's public modules; the core sees no plugin; plugins do not see each other."""

from __future__ import annotations

import ast
import re
from fnmatch import fnmatchcase
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tests.packaging.workspace import ROOT, Distribution, distributions, relative

PUBLIC = re.findall(
    r"^\| `(minisgl[\w.*]*)` \|", (ROOT / "docs/public-modules.md").read_text(), re.MULTILINE
)
PACKAGES = {dist.package for dist in distributions()}
SETTINGS_MODULES = ("plugin.py", "hookspecs.py", "settings.py")
HEAVY = {"torch", "triton", "flashinfer", "flash_attn"}

every_distribution = pytest.mark.parametrize("dist", distributions(), ids=str)


@every_distribution
def test_a_distribution_imports_no_other_but_the_core(dist: Distribution) -> None:
    foreign = PACKAGES - {dist.package, "minisgl"}
    assert [found for found in imports(dist) if found[1].split(".")[0] in foreign] == []


@every_distribution
def test_a_plugin_imports_only_public_modules_of_the_core(dist: Distribution) -> None:
    core = [found for found in imports(dist) if found[1].split(".")[0] == "minisgl"]
    private = [found for found in core if not is_public(found[1])]
    assert dist.package == "minisgl" or private == []


@every_distribution
def test_the_light_modules_import_no_heavy_library(dist: Distribution) -> None:
    light = [found for found in imports(dist) if found[0].split(":")[0].endswith(SETTINGS_MODULES)]
    assert [found for found in light if found[1].split(".")[0] in HEAVY] == []


@every_distribution
def test_what_a_distribution_imports_it_also_declares(dist: Distribution) -> None:
    (core,) = [each for each in distributions() if each.package == "minisgl"]
    declared = {canonicalize_name(req.name) for req in [*dist.requirements, *core.requirements]}
    owners = packages_distributions()  # of what is installed here; the rest cannot be told
    undeclared = [
        (where, module)
        for where, module in imports(dist)
        if (names := owners.get(module.split(".")[0]))
        and not declared & {canonicalize_name(name) for name in names}
        and module.split(".")[0] != dist.package
    ]
    assert undeclared == []


def test_every_public_module_that_is_named_exists() -> None:
    core = ROOT / "minisgl-core/src"
    patterns = {name: name.replace(".", "/").replace("*", "**/*") for name in PUBLIC}
    missing = [
        name
        for name, pattern in patterns.items()
        if not any(core.glob(f"{pattern}{end}") for end in (".py", "/__init__.py"))
    ]
    assert missing == []


def is_public(module: str) -> bool:
    return any(fnmatchcase(module, pattern) for pattern in PUBLIC)


def imports(dist: Distribution) -> list[tuple[str, str]]:
    """Where each module is imported, and its name."""
    return [
        (f"{relative(path)}:{node.lineno}", name)
        for path in sorted(dist.source.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in imported_names(node)
    ]


def imported_names(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [submodule(node.module or "", alias.name) for alias in node.names]


def submodule(module: str, name: str) -> str:
    """The module that `from module import name` imports: a module of that name, or `module`."""
    path = Path(*module.split("."), name)
    sources = [dist.folder / "src" for dist in distributions()]
    found = any((s / path).with_suffix(".py").is_file() or (s / path).is_dir() for s in sources)
    return f"{module}.{name}" if found else module
