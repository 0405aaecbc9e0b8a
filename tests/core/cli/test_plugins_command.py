from __future__ import annotations

import json
from typing import Any

import pytest

from minisgl.cli.main import main
from minisgl.plugin.machine import read_machine
from tests.core.plugin.installed import Boot

Capture = pytest.CaptureFixture[str]


def listing(capsys: Capture, *arguments: str) -> dict[str, Any]:  # Any: JSON
    assert main(["plugins", "--json", "--device", "cpu", *arguments]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def row(document: dict[str, Any], kind: str, name: str) -> dict[str, Any]:  # Any: JSON
    (found,) = [r for r in document["backends"] if (r["kind"], r["name"]) == (kind, name)]
    assert isinstance(found, dict)
    return found


def diagnosis(capsys: Capture) -> tuple[int, dict[str, list[dict[str, str]]]]:
    code = main(["plugins", "doctor", "--json", "--device", "cpu"])
    document = json.loads(capsys.readouterr().out)
    assert document["is_healthy"] == (code == 0)
    by_level: dict[str, list[dict[str, str]]] = {"ok": [], "note": [], "problem": []}
    for finding in document["findings"]:
        by_level[finding["level"]].append(finding)
    return code, by_level


@pytest.fixture(autouse=True)
def _only_the_core_and_throwaways(monkeypatch: pytest.MonkeyPatch) -> None:
    siblings = ("attn-fa", "attn-flashinfer", "kernels-cuda", "moe-triton", "server")
    monkeypatch.setattr("minisgl.plugin.discovery.distributions", _without(siblings))


def _without(siblings: tuple[str, ...]) -> Any:  # Any: stands in for importlib.metadata's function
    from importlib.metadata import distributions  # noqa: PLC0415  # the original, before patching

    names = {f"minisgl-{name}" for name in siblings}
    return lambda: (dist for dist in distributions() if dist.metadata["Name"] not in names)


def test_the_table_says_what_works_and_what_auto_picks(boot: Boot, capsys: Capture) -> None:
    boot("acme-good", "acme-bad-probe")
    assert main(["plugins", "--device", "cpu"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = {tuple(line[:2]): line[2:] for line in lines if len(line) > 4}
    assert rows["attention", "good/goodie"][:5] == ["acme-good", "1.0", "yes", "prefill,", "decode"]
    assert rows["cache", "says-no"] == ["acme-bad-probe", "1.0", "no", "-", "needs", "a", "moon"]
    assert rows["cache", "radix"][2:4] == ["yes", "picked"]


def test_json_says_the_same(boot: Boot, capsys: Capture) -> None:
    boot("acme-good", "acme-bad-probe")
    document = listing(capsys)
    good = row(document, "attention", "good")
    assert (good["is_available"], good["priority"], good["auto"]) == (True, 7, "prefill, decode")
    assert good["aliases"] == ["goodie"]
    assert row(document, "cache", "says-no")["reason"] == "needs a moon"
    assert row(document, "source", "demo")["auto"] == "1st"
    assert {"name": "good", "distribution": "acme-good", "version": "1.0"} in document["hooks"]


def test_a_backend_that_does_not_load_is_listed_with_the_reason(
    boot: Boot, capsys: Capture
) -> None:
    boot("acme-future")
    found = row(listing(capsys), "attention", "future")
    assert found["is_available"] is False
    assert "written for plugin api 2" in found["reason"]


def test_a_special_case_can_be_asked_for(boot: Boot, capsys: Capture) -> None:
    boot("acme-good")
    document = listing(capsys, "--dtype", "bfloat16")
    assert document["asked_for"]["dtype"] == "bfloat16"


def test_what_is_left_out_is_said(
    boot: Boot, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot("acme-good")
    monkeypatch.setenv("MINISGL_PLUGINS", "-acme-good")
    document = listing(capsys)
    assert document["left_out"] == ["acme-good"]
    assert "good" not in {each["name"] for each in document["backends"]}


def test_a_healthy_installation_is_exit_code_0(boot: Boot, capsys: Capture) -> None:
    boot("acme-good")
    code, found = diagnosis(capsys)
    assert found["problem"] == []
    assert code == 0
    texts = {finding["subject"]: finding["text"] for finding in found["ok"]}
    assert texts["attention backend 'good'"] == "works here, acme-good 1.0"
    assert texts["hook plugin 'good'"] == "loaded, acme-good 1.0"


def test_the_doctor_finds_everything_that_is_broken(boot: Boot, capsys: Capture) -> None:
    boot("acme-raises", "acme-exits", "acme-future", "acme-stale", "acme-broken-factory")
    code, found = diagnosis(capsys)
    assert code == 1
    texts = " | ".join(finding["text"] for finding in found["problem"])
    for expected in (
        "hook plugin 'raises' of acme-raises 1.0: RuntimeError: the library is broken",
        "hook plugin 'exits' of acme-exits 1.0: SystemExit: 3",
        "attention backend 'future' of acme-future 1.0: written for plugin api 2",
        "attention backend 'stale' of acme-stale 1.0: its metadata name the module 'acme_stale'",
        "OSError: libcudart.so.12: cannot open; reinstall acme-broken-factory",
    ):
        assert expected in texts
    details = "".join(finding["details"] for finding in found["problem"])
    assert "acme_raises.py" in details


def test_the_doctor_finds_names_that_collide(boot: Boot, capsys: Capture) -> None:
    boot("acme-twin-a", "acme-twin-b")
    _, found = diagnosis(capsys)
    (problem,) = found["problem"]
    assert problem["subject"] == "attention backend 'twin'"
    assert "acme-twin-a:twin" in problem["text"]
    assert "acme-twin-b:twin" in problem["text"]


def test_the_doctor_finds_versions_that_clash(boot: Boot, capsys: Capture) -> None:
    boot("acme-needy")
    _, found = diagnosis(capsys)
    (problem,) = found["problem"]
    assert problem["subject"] == "acme-needy"
    assert "needs minisgl-core<0.1, and " in problem["text"]
    assert "needs acme-nowhere, which is not installed" in problem["text"]


def test_the_doctor_finds_unknown_variables(
    boot: Boot, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot()
    monkeypatch.setenv("MINISGL_PAGE_SISE", "1")
    _, found = diagnosis(capsys)
    assert [finding["subject"] for finding in found["problem"]] == ["MINISGL_PAGE_SISE"]


def test_the_report_for_people_ends_with_the_verdict(boot: Boot, capsys: Capture) -> None:
    boot("acme-raises")
    assert main(["plugins", "doctor", "--device", "cpu"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "2 problems found"
    assert any(line.startswith("problem  hook plugin 'raises': ") for line in lines)


def test_a_machine_can_be_described_without_its_gpus() -> None:
    machine = read_machine("cpu")
    assert (machine.device, machine.sm, machine.default_dtype) == ("cpu", None, "float32")


def test_hidden_gpus_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert read_machine().device == "cpu"


@pytest.mark.parametrize(
    ("visible", "reason"),
    [
        ("", "cpu (no NVIDIA GPU 1 is found among CUDA_VISIBLE_DEVICES=), float32"),
        ("0", "cpu (no NVIDIA GPU 1 is found among CUDA_VISIBLE_DEVICES=0), float32"),
        (
            "0, GPU-6a",
            "cpu (CUDA_VISIBLE_DEVICES names GPU 1 by UUID, which is not looked up",
        ),
    ],
)
def test_a_gpu_that_is_asked_for_and_not_found_has_a_reason(
    visible: str, reason: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert main(["plugins", "--device", "cuda:1"]) == 0
    assert f"asked for: {reason}" in capsys.readouterr().out
