"""Running the quick commands of the documentation, on a tiny model in place of those it names.

What would take long, install, or need a GPU is checked at first: flags are parsed and settings
filled, files, targets, modules and distributions have to exist. `RealShell` runs all of that.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from minisgl.cli.main import main
from tests.docs.doc_blocks import Command
from tests.docs.doc_checks import (
    check_arguments,
    check_make,
    check_module,
    check_pip,
    check_pytest,
    subcommand,
)
from tests.docs.stand_ins import with_stand_ins
from tests.packaging.workspace import ROOT

URL = "http://127.0.0.1:1919"
MODELS = re.compile(r"^(demo|MODEL|M|MODEL_FOLDER|PATH|[\w.-]+/[\w.-]*\d[bB]\b[\w.-]*)$")
NOT_RUN = ("serve", "bench moe")
"""Subcommands of which the arguments are checked."""

DEAR_PROGRAMS = ("make", "pip", "pytest")


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

    def run(self, documented: Command) -> None:
        """Run or check one command; what is wrong with it fails the test."""
        command = with_stand_ins(documented)
        words = list(command.words)
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
            words = [*words, *([] if "--url" in words else ["--url", f"{URL}/v1"])]
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
        command = ["curl", *self.substituted(words)]
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


def is_server(words: Sequence[str]) -> bool:
    """Whether a command line starts a server, which runs until it is ended."""
    rest = _of_minisgl(words)
    return bool(rest) and subcommand(rest) == "serve" and not {"--help", "--shell"} & set(rest)


def is_dear(command: Command) -> bool:
    """Whether a command is only checked by `Shell`."""
    words = with_stand_ins(command).words
    rest = _of_minisgl(words)
    if rest:
        return subcommand(rest) in NOT_RUN and rest[-1] != "--help"
    return Path(words[0]).name in DEAR_PROGRAMS or words[1:2] == ("-m",)


def _of_minisgl(words: Sequence[str]) -> list[str]:
    """Return the arguments of `minisgl`; none if another program is run."""
    if tuple(words[:3]) == ("python", "-m", "minisgl"):
        return list(words[3:])
    return list(words[1:]) if Path(words[0]).name == "minisgl" else []


def clean_environment(patch: pytest.MonkeyPatch) -> None:
    """Take the settings of whoever runs the tests out of the environment."""
    for name in [name for name in os.environ if name.startswith("MINISGL_")]:
        patch.delenv(name)
