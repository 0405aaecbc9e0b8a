"""Finding a C++ compiler, and what is said where it refuses."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import pytest

from minisgl.errors import CompileError, PluginError
from minisgl.native.compiler import Compiler


def write_script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_without_a_compiler_the_error_says_what_would_help(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    wanted = r"no C\+\+ compiler found \(tried c\+\+, g\+\+, clang\+\+\); install g\+\+ or set CXX"
    with pytest.raises(CompileError, match=wanted):
        Compiler.find()


def test_a_compiler_that_the_user_names_is_not_replaced_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompileError, match="tried no-such-compiler"):
        Compiler.find()


def test_the_named_compiler_may_have_arguments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = write_script(tmp_path / "wrapper", "exit 0")
    monkeypatch.setenv("CXX", f"{program} --of g++")
    assert Compiler.find().command == (program, "--of", "g++")


def test_the_usual_names_are_tried_in_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    second = write_script(tmp_path / "clang++", "exit 0")
    assert Compiler.find().command == (second,)
    first = write_script(tmp_path / "g++", "exit 0")
    assert Compiler.find().command == (first,)


def test_a_refusal_names_the_unit_and_shows_the_last_lines(tmp_path: Path) -> None:
    program = write_script(
        tmp_path / "c++", "for i in $(seq 100); do echo line $i; done >&2; exit 3"
    )
    wanted = r"broken\.cpp does not compile with .*\(status 3\).*line 100; set CXX"
    with pytest.raises(CompileError, match=f"(?s){wanted}") as caught:
        Compiler((program,), ()).compile("broken", {"broken.cpp": ""})
    assert "line 50\n" not in str(caught.value)


def test_a_program_that_cannot_be_run_is_an_error_too(tmp_path: Path) -> None:
    missing = str(tmp_path / "gone")
    with pytest.raises(CompileError, match="cannot be run"):
        Compiler((missing,), ()).compile("unit", {"unit.cpp": ""})


def test_success_without_a_result_is_an_error(tmp_path: Path) -> None:
    program = write_script(tmp_path / "c++", "exit 0")
    with pytest.raises(CompileError, match=r"status 0.*no message"):
        Compiler((program,), ()).compile("unit", {"unit.cpp": ""})


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_a_pragma_that_would_be_ignored_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "c++")
    source = "void f() {\n#pragma omp parallel\n{}\n}\n"
    with pytest.raises(CompileError, match="pragma"):
        Compiler.find().compile("unit", {"unit.cpp": source})


def test_another_version_of_the_compiler_is_told_apart(tmp_path: Path) -> None:
    program = write_script(tmp_path / "c++", "exit 0")
    compiler = Compiler((program,), ("-O3",))
    before = compiler.identity()
    assert Compiler((program,), ("-O2",)).identity() != before
    write_script(tmp_path / "c++", "exit 0 # newer")
    assert compiler.identity() != before


def test_whoever_catches_plugin_errors_catches_these() -> None:
    assert issubclass(CompileError, PluginError)
