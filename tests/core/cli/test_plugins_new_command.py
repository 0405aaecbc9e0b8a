"""The command itself: names, refusals and what it prints."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from minisgl.cli.main import main
from minisgl.cli.plugin_kinds import PLUGIN_KINDS
from minisgl.plugin.discovery import KINDS
from tests.core.cli.new_plugins import NAMES, write_plugin

Capture = pytest.CaptureFixture[str]


def complaint(capsys: Capture, *arguments: str) -> str:
    assert main(["plugins", "new", *arguments]) == 2
    return capsys.readouterr().err


def project(folder: Path) -> dict[str, Any]:  # Any: parsed TOML
    content: dict[str, Any] = tomllib.loads(
        (folder / "pyproject.toml").read_text()
    )  # Any: as above
    return content["project"]  # type: ignore[no-any-return]  # a table


@pytest.mark.parametrize("kind", PLUGIN_KINDS)
def test_every_kind_is_a_complete_distribution(tmp_path: Path, kind: str) -> None:
    folder = write_plugin(tmp_path, kind, NAMES[kind])
    (package,) = (folder / "src").iterdir()
    assert package.name == folder.name.replace("-", "_")
    papers = {"LICENSE", "README.md", "pyproject.toml", ".gitignore", ".github", "src", "tests"}
    assert papers == {path.name for path in folder.iterdir()}
    assert {"__init__.py", "plugin.py", "backend.py", "py.typed"} <= {
        path.name for path in package.iterdir()
    }
    assert list((folder / "tests").glob("test_*.py"))


@pytest.mark.parametrize("kind", PLUGIN_KINDS)
def test_its_metadata_name_what_is_there(tmp_path: Path, kind: str) -> None:
    folder = write_plugin(tmp_path, kind, NAMES[kind])
    meta = project(folder)
    group = f"minisgl.{kind}" if kind in KINDS else "minisgl"
    ((name, target),) = meta["entry-points"][group].items()
    assert (meta["name"], name) == (folder.name, NAMES[kind])
    module, _, attribute = target.partition(":")
    tree = ast.parse((folder / "src" / Path(*module.split("."))).with_suffix(".py").read_text())
    defined = {t.id for node in tree.body if isinstance(node, ast.Assign) for t in node.targets}  # type: ignore[attr-defined]  # plain names
    assert attribute in defined or not attribute
    core = [each for each in meta["dependencies"] if each.startswith("minisgl-core")]
    assert core == ["minisgl-core>=0.1"]


@pytest.mark.parametrize("kind", PLUGIN_KINDS)
@pytest.mark.parametrize("length", [1, 24])
def test_names_of_any_length_are_formatted(tmp_path: Path, kind: str, length: int) -> None:
    letters = "q" * length
    write_plugin(tmp_path, kind, letters.upper() if kind == "model" else letters)
    for check in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *check, "--no-cache", "--quiet", str(tmp_path)]
        run = subprocess.run(ruff, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stdout + run.stderr


def test_json_says_what_was_written(tmp_path: Path, capsys: Capture) -> None:
    folder = write_plugin(tmp_path, "attention", "my-attn", "--json")
    document = json.loads(capsys.readouterr().out)
    assert document["folder"] == str(folder)
    assert (document["kind"], document["name"]) == ("attention", "my-attn")
    assert (document["distribution"], document["package"]) == (folder.name, "minisgl_attn_my_attn")
    written = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    assert sorted(document["files"]) == written
    assert document["next"][0] == f"pip install --editable '{folder}[test]'"


def test_people_are_told_what_to_do_next(tmp_path: Path, capsys: Capture) -> None:
    folder = write_plugin(tmp_path, "attention", "my-attn")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{folder}: an attention backend")
    assert f"test it:     pytest {folder}" in lines


def test_distribution_licence_and_author_can_be_chosen(tmp_path: Path) -> None:
    flags = ("--distribution", "Acme.Attention", "--license", "MIT", "--author", 'A "B" C')
    folder = write_plugin(tmp_path, "attention", "my-attn", *flags)
    meta = project(folder)
    assert (folder.name, meta["name"]) == ("acme-attention", "acme-attention")
    assert (meta["license"], meta["authors"]) == ("MIT", [{"name": 'A "B" C'}])
    assert (folder / "src/acme_attention/plugin.py").is_file()
    assert 'A "B" C' in (folder / "LICENSE").read_text()


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path, capsys: Capture) -> None:
    folder = write_plugin(tmp_path, "cache", "my-cache")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    error = complaint(capsys, "cache", "my-cache", "--dir", str(tmp_path))
    assert f"--dir {tmp_path}: holds {folder.name} already; nothing is written" in error
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "needs KIND and NAME; kinds: attention, cache"),
        (("attention",), "needs KIND and NAME"),
        (("atention", "x"), "KIND atention: must be one of attention, "),
        (("atention", "x"), "; did you mean attention"),
        (("attention", "My_Attn"), "NAME My_Attn: must be lower-case letters and digits"),
        (("attention", "a--b"), "NAME a--b: must be lower-case letters and digits"),
        (("attention", "auto"), "NAME auto: has a meaning of its own"),
        (("policy", "page-size"), "NAME page-size: has a meaning of its own"),
        (("model", "my-model"), "NAME my-model: a model is named by the class in config.json"),
        (("attention", "torch"), "NAME torch: an installed distribution offers an attention"),
        (("source", "hf"), "NAME hf: an installed distribution offers a model source"),
        (("model", "LlamaForCausalLM"), "NAME LlamaForCausalLM: an installed distribution"),
        (("command", "generate"), "NAME generate: an installed distribution offers a subcommand"),
        (("cache", "x", "--distribution=-x"), "--distribution -x: must have letters"),
        (("cache", "x", "--distribution=NumPy"), "--distribution numpy: is installed"),
        (("cache", "x", "--distribution=minisgl"), "its package 'minisgl' would hide"),
        (("cache", "x", "--distribution=class"), "its package 'class' would hide"),
        (("cache", "x", "--distribution=json"), "its package 'json' would hide"),
        (("cache", "x", "--license", "GPL"), "--license GPL: must be one of Apache-2.0, MIT"),
        (("cache", "x" * 101), "x: must have at most 100 characters, has 101"),
        (("model", "M" * 101), "M: must have at most 100 characters, has 101"),
        (
            ("cache", "x", f"--distribution={'y' * 201}"),
            "y: must have at most 200 characters, has 201",
        ),
        (("cache", "x", "--author=caf\udce9"), "must be UTF-8 without control characters"),
        (("cache", "x", "--author=a\nb"), "must be UTF-8 without control characters"),
        (("cache", "x", "--color"), "--color: unknown flag of minisgl plugins new"),
    ],
)
def test_what_cannot_be_written_is_refused(
    tmp_path: Path, capsys: Capture, arguments: tuple[str, ...], message: str
) -> None:
    assert message in complaint(capsys, *arguments, "--dir", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").write_text("")
    error = complaint(capsys, "cache", "x", "--dir", str(tmp_path / "file"))
    assert f"--dir {tmp_path / 'file'}: cannot be written" in error


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("x" * 300, "cannot be written"),
        ("caf\udce9", "must be UTF-8 without control characters"),
    ],
)
def test_a_folder_that_cannot_be_named_is_an_error(
    tmp_path: Path, capsys: Capture, folder: str, reason: str
) -> None:
    assert reason in complaint(capsys, "cache", "x", "--dir", str(tmp_path / folder))
    assert list(tmp_path.iterdir()) == []


def test_the_longest_names_can_be_written(tmp_path: Path) -> None:
    flags = ("--distribution", "y" * 200)
    assert write_plugin(tmp_path, "cache", "x" * 100, *flags).name == "y" * 200


def test_dashes_in_a_kind_are_underscores(tmp_path: Path) -> None:
    assert write_plugin(tmp_path, "logits-processor", "no-swearing").name == (
        "minisgl-logits-no-swearing"
    )
