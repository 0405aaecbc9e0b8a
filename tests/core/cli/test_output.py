"""Standard output that is full, closed or of a narrow encoding."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from minisgl.cli.main import main
from minisgl.cli.output import CheckedOutput
from minisgl.errors import OutputError

FULL = Path("/dev/full")
WORDS = {
    "version": ["version"],
    "plugins": ["plugins"],
    "help": ["--help"],
    "help of a command": ["generate", "--help"],
    "completion": ["completion", "bash"],
}


def run(words: list[str], redirection: str = "", **variables: str) -> tuple[int, str]:
    """Run ``minisgl`` under a shell; return its exit status and stderr."""
    process = subprocess.run(
        ["sh", "-c", f'"$@" {redirection}', "sh", sys.executable, "-m", "minisgl", *words],
        env={**os.environ, "MINISGL_PLUGINS": "", **variables},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    return process.returncode, process.stderr


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_a_full_output_is_one_line(words: list[str]) -> None:
    assert run(words, f">{FULL}") == (
        1,
        "minisgl: stdout: cannot be written: No space left on device\n",
    )


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_a_closed_output_is_one_line(words: list[str]) -> None:
    assert run(words, ">&-") == (1, "minisgl: stdout: cannot be written: is closed\n")


def test_closed_errors_change_nothing() -> None:
    assert run(["version"], "2>&-") == (0, "")
    assert run(["no-such-command"], "2>&-") == (2, "")


def printing(text: str) -> Callable[[], int]:
    """Return a command that prints a text."""

    def run_it() -> int:
        sys.stdout.write(text)
        return 0

    return run_it


def test_an_encoding_without_the_character_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", narrow)
    monkeypatch.setattr("minisgl.cli.dispatch.prepare", lambda arguments: printing("caf\xe9"))
    assert main(["anything"]) == 1
    assert capsys.readouterr().err == (
        "minisgl: stdout: its encoding ascii has no '\\xe9'; "
        "PYTHONIOENCODING=utf-8 has every character\n"
    )
    assert sys.stdout is narrow


class Broken(io.StringIO):
    """A stream that fails in a way of its own."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def write(self, text: str) -> int:
        raise self._error


def test_a_reader_that_has_gone_is_told_from_a_failure() -> None:
    with pytest.raises(BrokenPipeError):
        CheckedOutput(Broken(BrokenPipeError(32, "Broken pipe"))).write("a")
    with pytest.raises(OutputError, match="stdout: cannot be written: Input/output error"):
        CheckedOutput(Broken(OSError(5, "Input/output error"))).writelines(["a"])


def test_all_else_is_the_stream_s_own() -> None:
    inner = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    checked = CheckedOutput(inner)
    assert checked.encoding == "latin-1"
    assert checked.isatty() is False
    assert checked.write("abc") == 3
    checked.flush()
    assert checked.buffer.getvalue() == b"abc"
