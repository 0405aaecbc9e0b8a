from __future__ import annotations

import os
import subprocess
import sys

import pytest

from minisgl.cli.main import main
from minisgl.plugin.discovery import CORE, discover
from tests.core.plugin.installed import Boot, Site


@pytest.fixture(autouse=True)
def _no_settings_and_no_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make results independent of the environment and of what else is installed in it."""
    for name in [name for name in os.environ if name.startswith("MINISGL_")]:
        monkeypatch.delenv(name)
    siblings = [name for name in discover().versions if name.startswith("minisgl-")]
    siblings.remove(CORE)
    monkeypatch.setenv("MINISGL_PLUGINS", ",".join(f"-{name}" for name in siblings))


def test_without_arguments_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "generate text from a prompt" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["plugins", "-h"]])
def test_help_is_no_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("usage: minisgl")


def test_help_shows_flags_of_plugins_with_their_defaults(
    boot: Boot, capsys: pytest.CaptureFixture[str]
) -> None:
    boot("acme-good")
    main(["generate", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--good.num-splits INT parts [default 0, env MINISGL_GOOD__NUM_SPLITS]" in text


@pytest.mark.parametrize("arguments", [["version"], ["--version"], ["-V"]])
def test_versions_are_shown(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert {"minisgl-core", "torch", "python"} <= {line.split()[0] for line in out.splitlines()}


def test_a_plugin_adds_a_subcommand(boot: Boot) -> None:
    boot("acme-good")
    assert main(["hello"]) == 7


def test_an_interrupt_ends_without_a_traceback(
    boot: Boot, capsys: pytest.CaptureFixture[str]
) -> None:
    boot("acme-good")
    assert main(["interrupted"]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


def test_a_reader_that_has_gone_is_no_traceback(site: Site) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "minisgl", "plugins"],
        env={**os.environ, "PYTHONPATH": str(site("acme-good"))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=60) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["serve", "m"],
            "serve: needs minisgl-server, which is not installed; pip install minisgl-server",
        ),
        (
            ["--model", "m"],
            "serve: needs minisgl-server, which is not installed; pip install minisgl-server",
        ),
        (
            ["generat"],
            "generat: no such subcommand; installed: completion, generate, plugins, plugins new, "
            "replay, version; did you mean generate",
        ),
        (
            ["generate", "--page-sise", "3"],
            "--page-sise: unknown flag of minisgl generate; did you mean --page-size",
        ),
        (
            ["generate", "m", "p", "--page-size", "0"],
            "--page-size 0: must be an integer from 1 to 65536, or auto",
        ),
        (
            ["generate", "m", "p", "--tp-size", "x"],
            "--tp-size x: must be an integer from 1 to 1024",
        ),
        (
            ["generate", "--model"],
            "argument --model/--model-path: expected one argument; see `minisgl generate --help`",
        ),
        (
            ["generate", "--prompt-file", "p"],
            "model: is missing; give it as --model, MINISGL_MODEL or the key model",
        ),
        (["version", "x"], "x: minisgl version takes no further argument"),
        (["plugins", "x"], "minisgl plugins x: may be doctor or new"),
        (
            ["plugins", "--dtype", "int8"],
            "--dtype int8: must be one of auto, float32, float16, bfloat16",
        ),
        (["plugins", "--device", "tpu"], "--device tpu: must be one of auto, cpu, cuda, cuda:N"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setenv("MINISGL_PLUGINS", "minisgl-core")
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"minisgl: {message}\n"


def test_an_unknown_plugin_in_the_list_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MINISGL_PLUGINS", "nobody")
    assert main(["version"]) == 1
    assert "no installed distribution 'nobody' offers anything" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["serve", "m"], ["serve", "--model", "m"], ["--model", "m"], ["--model-path=m"]]
)
def test_serve_takes_its_model_in_every_spelling(
    boot: Boot, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    boot("acme-server")
    assert main(arguments) == 0
    assert capsys.readouterr().out == "m 127.0.0.1 1919\n"


def test_a_command_has_settings_of_its_own(
    boot: Boot, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    boot("acme-server")
    monkeypatch.setenv("MINISGL_HOST", "::")
    main(["serve", "m", "--port", "80", "--origins", "a,b", "--origins", "c"])
    assert capsys.readouterr().out == "m :: 80 a b c\n"


def test_the_settings_of_one_command_are_known_to_the_others(
    boot: Boot, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    boot("acme-server")
    monkeypatch.setenv("MINISGL_PORT", "80")
    assert main(["generate", "--port", "80", "m", "p"]) == 2
    assert capsys.readouterr().err == "minisgl: --port: is a flag of minisgl serve\n"


def test_a_model_in_the_environment_leaves_positions_to_others(
    boot: Boot, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    boot("acme-server")
    monkeypatch.setenv("MINISGL_MODEL", "e")
    assert main(["serve", "m"]) == 2
    assert capsys.readouterr().err == "minisgl: m: minisgl serve takes no further argument\n"
    assert main(["serve", "--model", "m"]) == 0


def test_a_broken_plugin_leaves_the_command_usable(
    boot: Boot, capsys: pytest.CaptureFixture[str]
) -> None:
    boot("acme-raises", "acme-exits", "acme-future", "acme-stale", "acme-bad-hooks")
    assert main(["--help"]) == 0
    assert main(["generate", "--help"]) == 0
    assert main(["version"]) == 0
