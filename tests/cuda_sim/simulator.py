"""Builds the CUDA sources with g++ against ``instructions_sim.h`` and launches them on tensors."""

from __future__ import annotations

import ctypes
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

import torch

import minisgl_kernels_cuda
from minisgl_kernels_cuda.units import Launch, Loader, Unit, macro_of

SOURCES = Path(minisgl_kernels_cuda.__file__).parent / "sources"
HEADERS = Path(__file__).parent


class SimulatedLaunch:
    """One kernel, run to its end by each call."""

    def __init__(self, run: ctypes._NamedFuncPointer, layout: str) -> None:
        self._run = run
        self._layout = layout

    def __call__(
        self, grid: tuple[int, int], block: tuple[int, int], *args: float, shared_bytes: int = 0
    ) -> None:
        shape = (ctypes.c_int * 4)(*grid, *block)
        self._run(shape, struct.pack(self._layout, *args))


class SimulatedLoader(Loader):
    """Builds each unit once into a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, unit: Unit, dtype: torch.dtype) -> Mapping[str, Launch]:
        macro = macro_of(dtype)
        built = self._folder / f"{unit.name}-{macro}.so"
        if not built.exists():
            build(unit, macro, built)
        library = ctypes.CDLL(str(built))
        return {
            name: SimulatedLaunch(getattr(library, f"sim_{name}"), layout)
            for name, layout in unit.entries.items()
        }


def build(unit: Unit, macro: int, built: Path) -> None:
    """Build one unit; a failure shows what g++ said."""
    source = built.with_suffix(".cpp")
    exports = "".join(f"SIM_EXPORT({name})\n" for name in unit.entries)
    source.write_text(f'#include "{unit.name}.cu"\n{exports}')
    done = subprocess.run(
        [
            *("g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC"),
            *("-DMINISGL_SIMULATOR", f"-DMINISGL_DTYPE={macro}"),
            *(f"-I{SOURCES}", f"-I{HEADERS}", "-o", str(built), str(source)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
