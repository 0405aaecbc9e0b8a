"""The attention and kernel suites pass for the GPU plugins over fakes of their libraries."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.fakes import fake_specs
from tests.fakes.install_fakes import FLASHINFER, flash_attention, installed

pytest_plugins = "pytester"


@pytest.mark.parametrize(
    ("kind", "spec", "libraries", "min_passed"),
    [
        ("attention", "FI", FLASHINFER, 40),
        ("attention", "FA2", flash_attention("2"), 30),
        ("attention", "FA3", flash_attention("3"), 40),
        ("attention", "FA4", flash_attention("4"), 40),
        ("kernels", "FI_KERNELS", FLASHINFER, 100),
    ],
)
def test_a_plugin_passes_its_suite(
    kind: str,
    spec: str,
    libraries: Mapping[str, str],
    min_passed: int,
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    nvcc = tmp_path / "cuda/bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    with installed(tmp_path / "site", libraries):
        monkeypatch.setattr("minisgl_attn_fa.backend.compute_capability", lambda device: 90)
        run = pytester.inline_run(
            *("--pyargs", f"minisgl.testing.conformance.test_{kind}", "-q"),
            f"--backend={kind}:{fake_specs.__name__}:{spec}",
            *("-p", "minisgl.testing.plugin", "-p", "no:cacheprovider", "--backend-device=cpu"),
        )
    passed, _, failed = run.listoutcomes()
    assert [report.longreprtext for report in failed] == []
    # Most of the suite runs; what it skips is what the libraries leave out.
    assert len(passed) >= min_passed
