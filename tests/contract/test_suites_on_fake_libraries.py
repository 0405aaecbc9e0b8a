"""The attention and kernel suites pass for the GPU plugins over fakes of their libraries."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.fakes.install_fakes import FLASHINFER, flash_attention, write_packages

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("kind", "spec", "libraries", "min_passed"),
    [
        ("attention", "FI", FLASHINFER, 40),
        ("attention", "FA2", flash_attention("2"), 20),
        ("attention", "FA3", flash_attention("3"), 40),
        ("attention", "FA4", flash_attention("4"), 40),
        ("kernels", "FI_KERNELS", FLASHINFER, 100),
    ],
)
def test_a_plugin_passes_its_suite(
    kind: str, spec: str, libraries: Mapping[str, str], min_passed: int, tmp_path: Path
) -> None:
    write_packages(tmp_path, {**libraries, "cuda/bin/nvcc": ""})
    # In a process of its own: the suite imports the backend over the fake library.
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
        *("--pyargs", f"minisgl.testing.conformance.test_{kind}", "-p", "minisgl.testing.plugin"),
        *(f"--backend={kind}:tests.fakes.fake_specs:{spec}", "--backend-device=cpu"),
    ]
    paths = [str(tmp_path), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    # One thread: the tensors are small, and other tests run beside.
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_HOME": str(tmp_path / "cuda"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    # Most of the suite runs; what it skips is what the libraries leave out.
    assert passed is not None
    assert int(passed[1]) >= min_passed
