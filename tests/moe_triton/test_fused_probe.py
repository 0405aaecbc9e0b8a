from __future__ import annotations

import argparse
import importlib

import pytest

from minisgl.errors import SettingsError
from minisgl.moe.contract import MoEBackend
from minisgl.plugin.commands import CommandContext, Subcommand
from minisgl.plugin.discovery import discover
from minisgl.plugin.manager import PluginManager
from minisgl.plugin.spec import ProbeContext
from minisgl_moe_triton import command, plugin
from minisgl_moe_triton.plugin import MOE, probe_moe

GPU = ProbeContext(device="cuda", sm=90, dtype="bfloat16")


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(plugin, "find_spec", lambda name: object())


def test_a_modern_gpu_is_served_before_the_torch_reference() -> None:
    answer = probe_moe(GPU)
    assert answer.ok
    assert answer.priority > 0


@pytest.mark.parametrize("sm", [70, 75])
def test_an_old_gpu_is_refused(sm: int) -> None:
    answer = probe_moe(ProbeContext(device="cuda", sm=sm))
    assert not answer.ok
    assert f"this GPU has {sm / 10}" in answer.reason


def test_a_cpu_is_refused() -> None:
    answer = probe_moe(ProbeContext())
    assert not answer.ok
    assert "TRITON_INTERPRET=1" in answer.reason


def test_the_interpreter_is_never_picked_by_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    answer = probe_moe(ProbeContext())
    assert answer.ok
    assert answer.priority < 0


def test_without_triton_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "find_spec", lambda name: None)
    assert probe_moe(GPU).reason.endswith("pip install triton")


def test_the_factory_can_be_imported() -> None:
    pytest.importorskip("triton")
    module, _, name = MOE.factory.partition(":")
    assert issubclass(getattr(importlib.import_module(module), name), MoEBackend)


def bench_command() -> Subcommand:
    (command,) = plugin.minisgl_subcommands()
    return command


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"top_k": 0}, "--top-k 0: must be at least 1"),
        ({"top_k": 200}, "--top-k 200: must be at most"),
        ({"tokens": "8,x"}, "--tokens 8,x: must be numbers"),
    ],
)
def test_a_wrong_bench_argument_is_refused(flags: dict[str, object], message: str) -> None:
    pytest.importorskip("triton")
    run = importlib.import_module("minisgl_moe_triton.bench").run
    context = CommandContext(PluginManager(discover("")), default_arguments(**flags), (), None)
    with pytest.raises(SettingsError, match=message):
        run(context)


def test_the_command_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench_command().run == f"{command.__name__}:run"
    monkeypatch.setattr(command, "find_spec", lambda package: None)
    context = CommandContext(PluginManager(discover("")), default_arguments(), (), None)
    with pytest.raises(SettingsError, match="bench moe: package triton is not installed"):
        command.run(context)


def default_arguments(**changes: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add = bench_command().add_arguments
    assert add is not None
    add(parser)
    arguments = parser.parse_args([])
    vars(arguments).update(changes)
    return arguments
