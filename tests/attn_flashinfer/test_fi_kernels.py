"""The kernel set ``fi`` on the fake against plain formulas in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.ops.contract import OPS, KernelConfig
from tests.fakes.attention_case import assert_near

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cuda/bin/nvcc"
    path.parent.mkdir(parents=True)
    path.touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))


def offered(device: torch.device = CUDA, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    # Imported here, because the fake library is installed by a fixture.
    from minisgl_attn_flashinfer.kernels import FlashInferKernelSet  # noqa: PLC0415

    return dict(FlashInferKernelSet(KernelConfig(device, dtype)).ops())


def random(*size: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(size))
    return torch.randn(size, generator=generator).to(torch.bfloat16)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x.float(), weight.shape, weight.float(), 1e-6)


def test_it_offers_known_ops_and_no_sampler() -> None:
    ops = offered()
    assert set(ops) <= set(OPS)
    assert {"rms_norm", "fused_add_rms_norm", "rope", "silu_and_mul"} <= set(ops)
    assert "sample" not in ops


@pytest.mark.parametrize(
    ("device", "dtype"), [(torch.device("cpu"), torch.bfloat16), (CUDA, torch.float32)]
)
def test_it_offers_nothing_that_it_cannot_run(device: torch.device, dtype: torch.dtype) -> None:
    assert offered(device, dtype) == {}


def test_ops_without_compiled_module_are_left_out(
    tmp_path: Path, flashinfer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    for name in ("norm", "silu_and_mul"):
        path = flashinfer_folder / "flashinfer/data/aot" / name / f"{name}.so"
        path.parent.mkdir(parents=True)
        path.touch()
    assert set(offered()) == {"rms_norm", "fused_add_rms_norm", "silu_and_mul"}


@pytest.mark.parametrize("size", [(5, 64), (3, 4, 64), (2, 3, 4, 64)])
def test_rms_norm_keeps_shape_and_input(size: tuple[int, ...]) -> None:
    x, weight = random(*size), random(64)
    before = x.clone()
    out = offered()["rms_norm"](x, weight, 1e-6)
    assert_near(out, normed(x, weight))
    assert torch.equal(x, before)


def test_fused_add_rms_norm_returns_norm_and_sum() -> None:
    x, residual, weight = random(5, 64), random(5, 65)[:, :64], random(64)
    total = x.float() + residual.float()
    out, new_residual = offered()["fused_add_rms_norm"](x, residual, weight, 1e-6)
    assert_near(out, normed(total, weight))
    assert_near(new_residual, total)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (128, 64), (48, 48), (64, 24)])
def test_rope_rotates_halves_of_strided_rows(head_dim: int, rotary_dim: int) -> None:
    qkv = random(6, 8, head_dim)
    q, k = qkv[:, :4], qkv[:, 4:6]
    cache = torch.randn(32, rotary_dim)
    positions = torch.tensor([0, 3, 31, 7, 7, 1], dtype=torch.int32)
    expected = [rotated(x, cache[positions.long()]) for x in (q, k)]
    outs = offered()["rope"](q, k, positions, cache)
    for out, want in zip(outs, expected, strict=True):
        assert_near(out, want)


def rotated(x: Tensor, cos_sin: Tensor) -> Tensor:
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    out, half = x.float().clone(), cos.shape[-1]
    a, b = x[..., :half].float(), x[..., half : 2 * half].float()
    out[..., :half], out[..., half : 2 * half] = a * cos - b * sin, b * cos + a * sin
    return out


@pytest.mark.parametrize("width", [64, 20, 8])
@pytest.mark.parametrize(
    ("name", "activation"),
    [
        ("silu_and_mul", F.silu),
        ("gelu_and_mul", F.gelu),
        ("gelu_tanh_and_mul", lambda x: F.gelu(x, approximate="tanh")),
    ],
)
def test_activations_gate_the_first_half(
    name: str, activation: Callable[[Tensor], Tensor], width: int
) -> None:
    x = random(5, 2 * width)
    gate, up = x.float().chunk(2, dim=-1)
    out = offered()[name](x)
    assert_near(out, activation(gate) * up)
