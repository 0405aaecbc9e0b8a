"""A subcommand whose code fails ends with an error that names its plugin, and harms no other."""

from __future__ import annotations

import json
import logging

import pytest

from minisgl.cli.main import main
from tests.core.plugin.installed import Boot

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, boot: Boot) -> None:
    monkeypatch.delenv("MINISGL_CONFIG", raising=False)
    monkeypatch.setenv("MINISGL_PLUGINS", "acme-bad-commands")
    boot("acme-bad-commands")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no-flags", "its flags cannot be added: RuntimeError: no flags today"),
        ("clash", "its flags cannot be added: ArgumentError: argument --json: conflicting"),
        ("taken", "its flags cannot be added: ArgumentError: argument --model/--model-path: "),
        ("gone", "'acme_bad_commands:gone' is not there or cannot be called; reinstall or"),
        ("broken", "ModuleNotFoundError: No module named 'acme_nowhere'; reinstall or"),
        ("raises", "RuntimeError: run failed"),
        ("leaves", "returned None, which is not an exit code"),
        ("completes", "RuntimeError: no settings today"),
    ],
)
def test_the_error_names_the_plugin(name: str, reason: str, capsys: Capture) -> None:
    assert main([name]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"minisgl: subcommand {name!r} of acme-bad-commands 1.0: {reason}")


def test_what_it_raises_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        main(["raises"])
    assert "what the subcommand 'raises' raised" in caplog.text
    assert "acme_bad_commands.py" in caplog.text


def test_help_lists_it_beside_the_others(capsys: Capture) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "no-flags" in text
    assert "generate" in text


def test_completion_leaves_out_what_has_no_flags(
    capsys: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert main(["completion", "bash"]) == 0
    assert "raises" in capsys.readouterr().out
    left_out = [text for text in caplog.messages if "acme-bad-commands 1.0" in text]
    assert [text.split("'")[1] for text in left_out] == ["clash", "no-flags", "taken"]


def test_the_doctor_finds_it(capsys: Capture) -> None:
    assert main(["plugins", "doctor", "--json", "--device", "cpu"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    problems = {each["subject"] for each in findings if each["level"] == "problem"}
    names = {"no-flags", "clash", "taken", "gone", "broken"}
    assert {f"subcommand {name!r}" for name in names} <= problems
