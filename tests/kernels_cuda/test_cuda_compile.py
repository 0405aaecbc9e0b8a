"""Every source compiles for every architecture, and what was compiled is kept."""

from __future__ import annotations

import logging
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from minisgl.errors import PluginError
from minisgl_kernels_cuda.compiler import Compiler
from minisgl_kernels_cuda.units import MEMORY, UNITS, Unit

pytest.importorskip("cuda.core", reason="needs cuda-core and NVRTC", exc_type=ImportError)

Cubin = Callable[[str, Unit, int], bytes]
ARCHITECTURES = ("sm_80", "sm_90a", "sm_100")


@pytest.fixture(scope="module")
def cubin() -> Cubin:
    """Compile a unit for an architecture and an element type, once."""
    done: dict[tuple[str, str, int], bytes] = {}

    def compiled(arch: str, unit: Unit, macro: int) -> bytes:
        key = (arch, unit.name, macro)
        if key not in done:
            done[key] = Compiler(arch, None).cubin(unit, macro)
        return done[key]

    return compiled


def element_types(unit: Unit) -> tuple[int, ...]:
    """Those that a unit is used with: samples are drawn alike from all."""
    if unit.name == "sample":
        return (1,)
    # float32 products stay with the library, and prefills with other backends.
    return (1, 2) if unit.name.startswith(("linear", "attention_prefill")) else (1, 2, 3)


# Element types differ in a few conversions: each unit is compiled for another of them per
# architecture.
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_source_compiles_without_a_gpu(cubin: Cubin, unit: Unit, arch: str) -> None:
    if unit.only_arch not in ("", arch):
        pytest.skip(f"only {unit.only_arch} has its instructions")
    macros = element_types(unit)
    wanted = {"sm_90a": 1, "sm_80": 2, "sm_100": 3}[arch]
    assert_compiled(cubin(arch, unit, min(wanted, macros[-1])), unit)


@pytest.mark.slow
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_every_type_compiles_for_hopper(cubin: Cubin, unit: Unit) -> None:
    for macro in element_types(unit):
        assert_compiled(cubin("sm_90a", unit, macro), unit)


def assert_compiled(code: bytes, unit: Unit) -> None:
    for name in unit.entries:
        assert name.encode() in code


WITH_VALUE, PARAMETER = 0x04, 0x17  # of an entry of .nv.info: that it has a size; what it is
PARAMETER_INFO = struct.Struct("<IHHI")  # an index, the parameter's number, its place, its size


class Section(NamedTuple):
    """Of an ELF file."""

    data: bytes
    alignment: int


def sections(elf: bytes) -> dict[str, Section]:
    """The sections of a 64-bit ELF file by name."""
    (table_at,) = struct.unpack_from("<Q", elf, 40)
    num, names_in = struct.unpack_from("<HH", elf, 60)
    headers = [struct.unpack_from("<I20xQQ8xQ", elf, table_at + 64 * i) for i in range(num)]
    names_at = headers[names_in][1]
    return {
        elf[names_at + name : elf.index(b"\0", names_at + name)].decode(): Section(
            elf[at : at + size], alignment
        )
        for name, at, size, alignment in headers
    }


def parameter_sizes(info: bytes) -> list[int]:
    """Bytes of each parameter of the kernel that a section .nv.info is about."""
    sizes, at = {}, 0
    while at < len(info):
        form, kind, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == WITH_VALUE and kind == PARAMETER:
            _, number, _, packed = PARAMETER_INFO.unpack_from(info, at)
            sizes[number] = packed >> 18
        at += size if form == WITH_VALUE else 0
    return [sizes[number] for number in range(len(sizes))]


# The driver copies as many bytes from each argument's address as the parameter has: one that the
# layout lists in two pieces would shift all others.
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_layouts_list_each_parameter_with_its_size(cubin: Cubin, unit: Unit) -> None:
    found = sections(cubin("sm_90a", unit, 1))
    for name, layout in unit.entries.items():
        listed = [struct.calcsize(kind) for kind in re.findall(r"\d*\D", layout)]
        assert parameter_sizes(found[f".nv.info.{name}"].data) == listed, name


# Copies of rows to places between lines are split, which costs decode attention a tenth.
@pytest.mark.parametrize(
    "unit", [unit for unit in UNITS if unit.max_shared_bytes], ids=lambda unit: unit.name
)
def test_shared_memory_of_a_launch_begins_with_a_line(cubin: Cubin, unit: Unit) -> None:
    found = sections(cubin("sm_90a", unit, 1))
    assert {name: found[f".nv.shared.{name}"].alignment % 128 for name in unit.entries} == (
        dict.fromkeys(unit.entries, 0)
    )


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the units that were compiled, from here on."""
    names: list[str] = []
    compile_unit: Callable[..., bytes] = Compiler._compile

    def count(self: Compiler, unit: Unit, macro: int) -> bytes:
        names.append(unit.name)
        return compile_unit(self, unit, macro)

    monkeypatch.setattr(Compiler, "_compile", count)
    return names


def test_what_was_compiled_is_read_at_the_next_start(tmp_path: Path, counted: list[str]) -> None:
    first = Compiler("sm_90", tmp_path / "new").cubin(MEMORY, 1)
    assert Compiler("sm_90", tmp_path / "new").cubin(MEMORY, 1) == first
    assert counted == ["memory"]


def test_another_architecture_is_compiled_anew(tmp_path: Path, counted: list[str]) -> None:
    assert Compiler("sm_80", tmp_path).cubin(MEMORY, 1) != Compiler("sm_90", tmp_path).cubin(
        MEMORY, 1
    )
    assert len(counted) == 2


@pytest.mark.parametrize("damage", [b"", b"no code", None])
def test_a_damaged_file_is_compiled_anew(
    tmp_path: Path, counted: list[str], damage: bytes | None
) -> None:
    code = Compiler("sm_90", tmp_path).cubin(MEMORY, 1)
    [path] = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1] if damage is None else damage)
    assert Compiler("sm_90", tmp_path).cubin(MEMORY, 1) == code
    assert len(counted) == 2


def test_a_folder_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        assert Compiler("sm_90", tmp_path / "file").cubin(MEMORY, 1)
    assert "set --cuda.cache-dir to a writable folder" in caplog.text


def test_an_error_names_the_source_and_the_architecture() -> None:
    with pytest.raises(PluginError, match=r"memory\.cu does not compile for sm_1"):
        Compiler("sm_1", None).cubin(MEMORY, 1)
