"""What ``fi`` says of machines that it does not run on, without importing FlashInfer."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import rmtree

import pytest

from minisgl.plugin.spec import Availability, ProbeContext
from minisgl_attn_flashinfer.plugin import ATTENTION, KERNELS, probe_attention, probe_kernels

HOPPER = ProbeContext(device="cuda", sm=90, dtype="bfloat16", head_dim=128)
MODULE = (
    "batch_{}_with_kv_cache_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32"
    "_head_dim_qk_128_head_dim_vo_128_posenc_0_use_swa_{}_use_logits_cap_False{}"
)
DECODE = MODULE.format("decode", False, "")
PREFILL = MODULE.format("prefill", False, "_f16qk_False")
Build = Callable[[str], None]


@pytest.fixture(autouse=True)
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose CUDA toolkit is missing and whose cache is empty."""
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "workspace"))
    monkeypatch.delenv("FLASHINFER_NVCC", raising=False)
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT", raising=False)


@pytest.fixture
def compiler(tmp_path: Path) -> None:
    path = tmp_path / "cuda/bin/nvcc"
    path.parent.mkdir(parents=True)
    path.touch()


@pytest.fixture
def build(flashinfer_folder: Path) -> Build:
    """Put a compiled module into the folder of prebuilt ones."""

    def put(name: str) -> None:
        path = flashinfer_folder / "flashinfer/data/aot" / name / f"{name}.so"
        path.parent.mkdir(parents=True)
        path.touch()

    return put


@pytest.mark.parametrize(
    ("context", "reason"),
    [
        (ProbeContext(), "needs an NVIDIA GPU"),
        (replace(HOPPER, sm=70), "compute capability 7.5 or up, this GPU has 7.0"),
        (replace(HOPPER, sm=75), "bfloat16 needs compute capability 8.0.*--dtype float16"),
        (replace(HOPPER, dtype="float32"), "serves float16 and bfloat16, the model is float32"),
    ],
)
@pytest.mark.parametrize("probe", [probe_attention, probe_kernels])
def test_a_machine_that_cannot_run_it_is_told_why(
    probe: Callable[[ProbeContext], Availability], context: ProbeContext, reason: str
) -> None:
    answer = probe(context)
    assert not answer.ok
    _match(answer.reason, reason)


def test_a_missing_package_is_named(flashinfer_folder: Path) -> None:
    rmtree(flashinfer_folder / "flashinfer_python-0.6.4.dist-info")
    _match(probe_attention(HOPPER).reason, "pip install flashinfer-python")


def test_an_old_package_is_refused(flashinfer_folder: Path) -> None:
    path = flashinfer_folder / "flashinfer_python-0.6.4.dist-info/METADATA"
    path.write_text(path.read_text().replace("0.6.4", "0.5.3"))
    _match(probe_attention(HOPPER).reason, "0.6 or newer, 0.5.3 is installed")


def test_without_compiler_and_modules_it_says_what_to_install() -> None:
    answer = probe_attention(HOPPER)
    assert not answer.ok
    _match(answer.reason, "no compiled module for prefill_fa2.*CUDA_HOME.*flashinfer-jit-cache")


def test_prebuilt_modules_do_without_a_compiler(build: Build) -> None:
    build(DECODE)
    build(PREFILL)
    assert probe_attention(HOPPER).ok
    assert probe_attention(replace(HOPPER, head_dim=None)).ok
    _match(probe_attention(replace(HOPPER, head_dim=64)).reason, "head dimension 64")
    _match(probe_attention(replace(HOPPER, dtype="float16")).reason, "float16")
    _match(probe_attention(replace(HOPPER, has_sliding_window=True)).reason, "sliding window")


def test_prefill_alone_needs_no_decode_module(build: Build) -> None:
    build(PREFILL)
    assert probe_attention(replace(HOPPER, phase="prefill")).ok
    assert not probe_attention(replace(HOPPER, phase="decode")).ok


def test_a_prefill_module_for_hopper_alone_does_not_serve_decode(build: Build) -> None:
    build(PREFILL + "_sm90")
    build(DECODE)
    _match(probe_attention(HOPPER).reason, "prefill_fa2")


@pytest.mark.usefixtures("compiler")
def test_a_compiler_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe_attention(HOPPER).ok
    assert probe_kernels(HOPPER).ok
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert not probe_attention(HOPPER).ok


def test_modules_of_an_earlier_run_count(tmp_path: Path) -> None:
    for name in (DECODE, PREFILL):
        path = tmp_path / "workspace/.cache/flashinfer/0.6.4/90a/cached_ops" / name / f"{name}.so"
        path.parent.mkdir(parents=True)
        path.touch()
    assert probe_attention(HOPPER).ok


@pytest.mark.usefixtures("compiler")
def test_it_wants_decode_more_than_prefill() -> None:
    priorities = [probe_attention(replace(HOPPER, phase=p)).priority for p in ("prefill", "decode")]
    assert 0 < priorities[0] < priorities[1]


@pytest.mark.usefixtures("compiler")
def test_probing_imports_nothing_heavy() -> None:
    before = {name for name in sys.modules if name.startswith("flashinfer")}
    probe_attention(HOPPER)
    probe_kernels(HOPPER)
    assert {name for name in sys.modules if name.startswith("flashinfer")} == before == set()


def test_both_specs_name_existing_factories() -> None:
    for spec in (ATTENTION, KERNELS):
        module, _, name = spec.factory.partition(":")
        assert hasattr(__import__(module, fromlist=[name]), name)


def _match(text: str, pattern: str) -> None:
    assert re.search(pattern, text), f"{pattern!r} not in {text!r}"
