from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from minisgl_kernels_cuda.units import Loader
from tests.cuda_sim.simulator import SimulatedLoader


@pytest.fixture(scope="session")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Loader:
    """Kernels on the simulator."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    folder: Path = tmp_path_factory.mktemp("simulated-kernels")
    return SimulatedLoader(folder)
