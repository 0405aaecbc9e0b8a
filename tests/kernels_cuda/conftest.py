from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from minisgl_kernels_cuda.units import Launch, Loader, Unit
from tests.cuda_sim.simulator import SimulatedLoader


class SharingLoader(SimulatedLoader):
    """Builds into a folder that other processes of the run build into too: each unit once."""

    def load(self, unit: Unit, dtype: torch.dtype) -> Mapping[str, Launch]:
        built = self._built(unit, dtype)
        with built.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
            return super().load(unit, dtype)


@pytest.fixture(scope="session")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Loader:
    """Kernels on the simulator."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    folder: Path = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all processes of the run
    folder /= "simulated-kernels"
    folder.mkdir(exist_ok=True)
    return SharingLoader(folder)
