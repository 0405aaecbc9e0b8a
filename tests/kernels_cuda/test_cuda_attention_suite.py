"""The attention suite passes for the backend ``cuda`` on the simulator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from minisgl.attention.contract import AttentionBackend, AttentionConfig
from minisgl_kernels_cuda import plugin
from minisgl_kernels_cuda.attention import combine
from minisgl_kernels_cuda.units import DeviceSize, Loader
from tests.contract.suite_runs import run_suite

DEVICE = DeviceSize(num_sms=6, max_shared_bytes=227 << 10, arch="sm_90a")
# What the probe answers depends on the GPU; here the phases are tested one by one, and prefill in
# the type that is compared more narrowly.
DECODE = replace(plugin.ATTENTION, factory=f"{__name__}:Simulated")
PREFILL = replace(
    DECODE,
    capabilities=replace(plugin.BOTH_PHASES, phases=("prefill",), dtypes=("float16",)),
)


class Simulated:
    """Makes the backend; the suite knows it by its path alone."""

    loader: Loader

    def __new__(cls, config: AttentionConfig) -> AttentionBackend:  # type: ignore[misc]  # a factory
        return combine(config, cls.loader, DEVICE)


@pytest.mark.parametrize("spec", ["DECODE", "PREFILL"])
def test_the_backend_conforms(
    loader: Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str
) -> None:
    monkeypatch.setattr(Simulated, "loader", loader, raising=False)
    backend = f"attention:{__name__}:{spec}"
    assert run_suite(tmp_path, backend, "--backend-device=cpu") == []
