"""Builds the CUDA sources with g++ against ``instructions_sim.h`` and launches them on tensors."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

import minisgl_kernels_cuda
from minisgl_kernels_cuda.units import HeadsShape, Launch, Loader, Unit, macro_of

SOURCES = Path(minisgl_kernels_cuda.__file__).parent / "sources"
HEADERS = Path(__file__).parent


class SimulatedLaunch:
    """One kernel, run to its end by each call.

    Blocks, warps and lanes may come in any order, so every second call mixes them up. Ranks, whose
    blocks wait for each other, all take the same order.
    """

    def __init__(
        self, run: ctypes._NamedFuncPointer, layout: str, turn: threading.Lock, is_alone: bool
    ) -> None:
        self._run = run
        self._layout = layout
        self._turn = turn
        self._is_alone = is_alone
        self._is_mixed = False

    def __call__(
        self,
        grid: tuple[int, int],
        block: tuple[int, int],
        *args: float | bytes,
        shared_bytes: int = 0,
        cluster: int = 1,
    ) -> None:
        assert grid[0] % cluster == 0, "a grid is made of whole clusters"
        shape = (ctypes.c_int * 6)(*grid, *block, cluster, self._is_mixed)
        self._is_mixed ^= self._is_alone
        with self._turn:  # ctypes lets other threads run meanwhile
            self._run(shape, struct.pack(self._layout, *args))


class SimulatedLoader(Loader):
    """Builds each unit once into a folder.

    A library is one device, which runs one kernel at a time. Ranks that run theirs together, in
    threads, each load a copy of their own.
    """

    def __init__(self, folder: Path, rank: int | None = None) -> None:
        self._folder = folder
        self._rank = rank
        self._turn = threading.Lock()
        self._libraries: dict[Path, ctypes.CDLL] = {}

    @contextmanager
    def written_late(self, unit: Unit, *tensors: torch.Tensor) -> Iterator[None]:
        """Let tensors be not-a-numbers until the next kernel waits for the one in front of it.

        Args:
            unit: Of the kernel, loaded for the tensors' type.
            tensors: Contiguous.
        """
        library = self._libraries[self._built(unit, tensors[0].dtype)]
        for tensor in tensors:
            address, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
            library.sim_delay(ctypes.c_void_p(address), ctypes.c_ulonglong(size))
        yield
        library.sim_end_delay()

    def load(self, unit: Unit, dtype: torch.dtype) -> Mapping[str, Launch]:
        built = self._built(unit, dtype)
        if not built.exists():
            build(unit, macro_of(dtype), built)
        if self._rank is not None:
            own = self._folder / f"{built.stem}-rank-{self._rank}.so"
            if not own.exists():  # one that is in use is not written
                shutil.copy(built, own)
            built = own
        library = self._libraries[built] = ctypes.CDLL(str(built))
        return {
            name: SimulatedLaunch(
                getattr(library, f"sim_{name}"), layout, self._turn, self._rank is None
            )
            for name, layout in unit.entries.items()
        }

    def _built(self, unit: Unit, dtype: torch.dtype) -> Path:
        return self._folder / f"{unit.name}-{macro_of(dtype)}.so"

    def matrix_map(self, address: int, num_rows: int, num_columns: int, box_rows: int) -> bytes:
        return struct.pack("=QQQQ96x", address, num_rows, num_columns, box_rows)

    def heads_map(self, address: int, shape: HeadsShape, box: tuple[int, int]) -> bytes:
        heads = (shape.num_tokens, shape.token_stride, shape.num_heads, shape.head_dim)
        return struct.pack("=QQQQQQQ72x", address, *heads, *box)


def build(unit: Unit, macro: int, built: Path) -> None:
    """Build one unit; a failure shows what g++ said."""
    source = built.with_suffix(".cpp")
    exports = "".join(f"SIM_EXPORT({name})\n" for name in unit.entries)
    source.write_text(f'#include "{unit.name}.cu"\n{exports}')
    done = subprocess.run(
        [
            *("g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-fno-gnu-unique"),
            *("-DMINISGL_SIMULATOR", "-Wno-psabi", f"-DMINISGL_DTYPE={macro}"),
            *(f"-I{SOURCES}", f"-I{HEADERS}", "-o", str(built), str(source)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
