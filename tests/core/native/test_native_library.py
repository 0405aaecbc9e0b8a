"""Compiled units are kept, shared between processes, and made anew when damaged."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from minisgl.errors import CompileError
from minisgl.native.compiler import Compiler
from minisgl.native.library import Library, load_unit, unavailable_reason

HAS_COMPILER = unavailable_reason() is None
pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")

_LOAD = """
import sys, torch
from pathlib import Path
from minisgl.native.compiler import Compiler
from minisgl.native.library import Library
unit = Library(Compiler.find(), Path(sys.argv[1])).load("probe")
assert unit.probe_num_threads() == torch.get_num_threads()
"""


@dataclass(frozen=True)
class CountingCompiler:
    """The machine's compiler behind a script that notes each call."""

    compiler: Compiler
    log: Path

    @property
    def calls(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CountingCompiler:
    real, log = Compiler.find(), tmp_path / "calls"
    script = tmp_path / "compiler"
    script.write_text(f'#!/bin/sh\necho call >> "{log}"\nexec {" ".join(real.command)} "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(script))
    return CountingCompiler(Compiler.find(), log)


def test_the_code_joins_the_threads_of_torch() -> None:
    unit, before = load_unit("probe"), torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert unit.probe_num_threads() == count
    finally:
        torch.set_num_threads(before)


def test_the_process_has_one_openmp_runtime() -> None:
    load_unit("probe").probe_num_threads()
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    lines = maps.read_text().splitlines()
    assert len({line.split()[-1] for line in lines if "libgomp" in line or "libomp" in line}) <= 1


def test_what_was_compiled_is_read_at_the_next_start(
    tmp_path: Path, counting: CountingCompiler
) -> None:
    for _ in range(2):
        Library(counting.compiler, tmp_path / "new").load("probe")
    assert counting.calls == 1


def test_other_flags_compile_anew(tmp_path: Path, counting: CountingCompiler) -> None:
    Library(counting.compiler, tmp_path / "cache").compiled("probe")
    other = Compiler(counting.compiler.command, (*counting.compiler.flags, "-DOTHER"))
    Library(other, tmp_path / "cache").compiled("probe")
    assert counting.calls == 2


@pytest.mark.parametrize("damage", ["empty", "cut", "foreign"])
def test_a_damaged_file_is_compiled_anew(
    tmp_path: Path, counting: CountingCompiler, damage: str
) -> None:
    cache = tmp_path / "cache"
    Library(counting.compiler, cache).compiled("probe")
    [path] = cache.iterdir()
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "cut": whole[:-100], "foreign": b"no code"}[damage])
    assert Library(counting.compiler, cache).load("probe").probe_num_threads() >= 1
    assert counting.calls == 2


def test_processes_that_start_together_do_not_disturb_each_other(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _LOAD, str(tmp_path / "cache")]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(3)]
    errors = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], errors
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_folder_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        unit = Library(Compiler.find(), tmp_path / "file").load("rows")
    assert isinstance(unit, ctypes.CDLL)
    assert "cannot be kept" in caplog.text
    assert "set XDG_CACHE_HOME to a writable folder" in caplog.text


def test_a_first_compilation_is_announced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Library(Compiler.find(), tmp_path).load("rows")
    assert "compiling the native unit 'rows'" in caplog.text


def test_code_that_cannot_be_loaded_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "compiler"
    script.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho text > "$2"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    library = Library(Compiler((str(script),), ()), tmp_path / "cache")
    with pytest.raises(CompileError, match=r"probe\.cpp was compiled but cannot be loaded"):
        library.load("probe")


def test_the_reason_is_that_of_the_compiler(tmp_path: Path) -> None:
    code = "from minisgl.native.library import unavailable_reason; print(unavailable_reason())"
    env = {**os.environ, "CXX": "no-such-compiler", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert "no C++ compiler found (tried no-such-compiler)" in done.stdout


def test_the_probe_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from minisgl.native.library import unavailable_reason; "
        "print(unavailable_reason(), 'torch' in sys.modules)"
    )
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "None False"
    assert shutil.which("c++") is None or len(list(tmp_path.rglob("probe-*.so"))) == 1
