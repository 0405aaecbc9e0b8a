"""What the probe of ``cuda`` says where it cannot run."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minisgl.errors import PluginError
from minisgl.plugin.spec import Phase, ProbeContext
from minisgl_attn_flashinfer.plugin import PREFILL_PRIORITY as FLASHINFER_PRIORITY
from minisgl_kernels_cuda import plugin
from minisgl_kernels_cuda.settings import CudaKernelSettings, cache_folder
from minisgl_kernels_cuda.units import macro_of, read_sources

HOPPER = ProbeContext(device="cuda", sm=90, dtype="bfloat16")


@pytest.fixture(autouse=True)
def complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that cuda-core and NVRTC are installed."""
    monkeypatch.setattr(plugin, "_has_cuda_core", lambda: True)
    monkeypatch.setattr(plugin, "has_nvrtc", lambda: True)


def test_hopper_is_served_with_priority_over_flashinfer() -> None:
    answer = plugin.probe(HOPPER)
    assert answer.ok
    assert answer.priority > 20


@pytest.mark.parametrize(
    ("context", "reason"),
    [
        (ProbeContext(), "needs an NVIDIA GPU of compute capability 8.0 or up"),
        (ProbeContext(device="cuda", sm=75), "8.0 or up, this GPU has 7.5"),
        (
            ProbeContext(device="cuda", sm=90, dtype="float64"),
            "serves float16, bfloat16, float32, the model is float64",
        ),
    ],
)
def test_a_machine_or_model_that_is_not_served_is_named(context: ProbeContext, reason: str) -> None:
    answer = plugin.probe(context)
    assert not answer.ok
    assert reason in answer.reason


def test_attention_serves_both_phases_on_hopper_and_decode_elsewhere() -> None:
    for sm, dtype, phases in (
        (90, "bfloat16", ("prefill", "decode")),
        (90, "float32", ("decode",)),
        (80, "bfloat16", ("decode",)),
        (100, "float16", ("decode",)),
    ):
        answer = plugin.probe_attention(ProbeContext(device="cuda", sm=sm, dtype=dtype))
        assert answer.ok
        assert answer.capabilities is not None
        assert answer.capabilities.phases == phases


def test_prefill_elsewhere_is_refused_with_what_would_do() -> None:
    context = ProbeContext(device="cuda", sm=80, dtype="bfloat16", phase="prefill")
    answer = plugin.probe_attention(context)
    assert not answer.ok
    assert "needs compute capability 9.0, float16 or bfloat16, and at most 128" in answer.reason
    assert "--attn fi,cuda" in answer.reason


@pytest.mark.parametrize(("num_qo_heads", "is_served"), [(256, True), (258, False)])
def test_prefill_of_too_many_query_heads_is_left_to_others(
    num_qo_heads: int, is_served: bool
) -> None:
    context = replace(HOPPER, num_qo_heads=num_qo_heads, num_kv_heads=2)
    assert plugin.probe_attention(replace(context, phase="prefill")).ok == is_served
    answer = plugin.probe_attention(replace(context, phase="decode"))
    assert answer.ok
    assert answer.capabilities is not None
    assert ("prefill" in answer.capabilities.phases) == is_served


def test_each_phase_of_attention_has_its_own_priority() -> None:
    phases: tuple[Phase, ...] = ("prefill", "decode")
    priorities = {
        phase: plugin.probe_attention(replace(HOPPER, phase=phase)).priority for phase in phases
    }
    assert priorities == {
        "prefill": plugin.PREFILL_PRIORITY,
        "decode": plugin.MEASURED_PRIORITY[90],
    }


@pytest.mark.parametrize(
    ("page_size", "is_preferred"),
    [(None, True), (1, False), (2, False), (4, True), (5, False), (16, True), (64, True)],
)
def test_prefill_with_small_pages_is_left_to_others(
    page_size: int | None, is_preferred: bool
) -> None:
    context = replace(HOPPER, phase="prefill", page_size=page_size)
    assert (plugin.probe_attention(context).priority > FLASHINFER_PRIORITY) == is_preferred


@pytest.mark.parametrize(
    ("missing", "reason"),
    [("_has_cuda_core", "pip install 'cuda-core"), ("has_nvrtc", "pip install nvidia-cuda-nvrtc")],
)
def test_a_missing_package_is_named_with_its_command(
    monkeypatch: pytest.MonkeyPatch, missing: str, reason: str
) -> None:
    monkeypatch.setattr(plugin, missing, lambda: False)
    assert reason in plugin.probe(HOPPER).reason


def test_discovery_imports_nothing_heavy() -> None:
    code = (
        "import sys; import minisgl_kernels_cuda.plugin as p; p.KERNELS.probe(p.ProbeContext("
        "device='cuda', sm=90, dtype='bfloat16'));"
        "print([m for m in ('torch', 'cuda.core', 'cuda.bindings') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_cache_follows_setting_then_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder("") == Path("/somewhere/minisgl/kernels")
    assert cache_folder("/given") == Path("/given")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder(CudaKernelSettings().cache_dir) == Path.home() / ".cache/minisgl/kernels"


def test_sources_travel_with_the_package() -> None:
    assert {"device.cuh", "norm.cu", "sample.cu", "linear.cu"} <= set(read_sources())


def test_a_dtype_without_kernels_is_refused() -> None:
    with pytest.raises(PluginError, match="allowed: bfloat16, float16, float32"):
        macro_of(torch.float64)
