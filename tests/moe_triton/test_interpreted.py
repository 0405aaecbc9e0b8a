"""Runs the files ``check_*.py`` and the conformance suite with Triton's interpreter.

They need a process of their own: Triton reads ``TRITON_INTERPRET`` when it is imported, and other
tests import it, by way of transformers, without.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
CHECKS = sorted(map(str, HERE.glob("check_*.py")))
TIMEOUT_S = 300
# Sizes and types that `check_fused_layers.py` has as well, and many rounds of two backends.
LONG = "float16 or 60x4 or 256x352 or 128 or share_nothing"


def run_interpreted(*arguments: str) -> None:
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_interpreted_kernels_pass(which: str) -> None:
    run_interpreted(*CHECKS, "-m", which)


@pytest.mark.parametrize(
    "which", [f"not ({LONG})", pytest.param(LONG, marks=pytest.mark.slow)], ids=["usual", "long"]
)
def test_interpreted_kernels_conform(tmp_path: Path, which: str) -> None:
    ini = tmp_path / "pytest.ini"
    ini.write_text("[pytest]\n")
    run_interpreted(
        *("-c", str(ini), "--rootdir", str(tmp_path), "-p", "minisgl.testing.plugin"),
        *("--pyargs", "minisgl.testing", "--backend-device", "cpu"),
        *("--backend", "moe:minisgl_moe_triton.plugin:MOE", "-k", which),
    )
