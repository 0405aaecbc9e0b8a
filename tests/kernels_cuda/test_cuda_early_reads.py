"""What kernels read before the kernel in front has ended, on the simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from minisgl.ops.contract import QKVInputs
from minisgl.testing.attention_case import AttentionCase, AttentionShape
from minisgl.testing.paged_batches import newest
from minisgl.testing.reference import assert_close
from minisgl_kernels_cuda.activation import build_activations
from minisgl_kernels_cuda.attention import DecodeAttention
from minisgl_kernels_cuda.attention_plan import AttentionPlan
from minisgl_kernels_cuda.linear import LinearKernels
from minisgl_kernels_cuda.norm import Norms
from minisgl_kernels_cuda.qkv import QKVStage
from minisgl_kernels_cuda.units import (
    ACTIVATION,
    ATTENTION,
    LINEAR,
    LINEAR_BATCH,
    LINEAR_MANY,
    LINEAR_WIDE,
    NORM,
    QKV,
    DeviceSize,
    Unit,
)
from tests.cuda_sim.simulator import SimulatedLoader
from tests.kernels_cuda.planned_kernels import H200, LargeKernels
from tests.kernels_cuda.reference import BF16, cos_sin_cache, make

SHAPE = AttentionShape(head_dim=64, dtype=BF16, max_reqs=5, max_seq_len=320)


def test_what_is_read_too_early_is_not_a_number(loader: SimulatedLoader) -> None:
    x, weight = make(3, 64, dtype=BF16), make(64, dtype=BF16, seed=1)
    norms = Norms(loader, BF16)
    with loader.written_late(NORM, weight):  # which a norm may read at once
        assert norms.rms_norm(x, weight, 1e-6).isnan().all()
    assert norms.rms_norm(x, weight, 1e-6).isfinite().all()


def test_norms_wait_for_what_they_norm(loader: SimulatedLoader) -> None:
    x, residual = make(3, 64, dtype=BF16), make(3, 64, dtype=BF16, seed=1)
    norms, weight = Norms(loader, BF16), make(64, dtype=BF16, seed=2)
    expected = norms.fused_add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    with loader.written_late(NORM, x, residual):
        found = norms.fused_add_rms_norm(x, residual, weight, 1e-6)
        assert all(map(torch.equal, found, expected))


def test_activations_wait_for_the_product(loader: SimulatedLoader) -> None:
    x = make(3, 128, dtype=BF16)
    silu_and_mul = build_activations(loader, BF16)["silu_and_mul"]
    expected = silu_and_mul(x)
    with loader.written_late(ACTIVATION, x):
        assert torch.equal(silu_and_mul(x), expected)


@pytest.mark.parametrize("head_dim", [64, 48])
def test_the_qkv_stage_waits_for_the_product(loader: SimulatedLoader, head_dim: int) -> None:
    qkv, stage = make(3, 4 * head_dim, dtype=BF16), QKVStage(loader, BF16)
    pools = torch.zeros(2, 11, 1, head_dim, dtype=BF16)
    norm = make(head_dim, dtype=BF16, seed=1)
    inputs = QKVInputs(
        2, 1, head_dim, norm, norm, 1e-6, torch.tensor([0, 9, 3], dtype=torch.int32),
        cos_sin_cache(10, head_dim), pools[0], pools[1], torch.tensor([4, 10, 0]),
    )  # fmt: skip
    expected = stage.qk_norm_rope_store(qkv.clone(), inputs).clone(), pools.clone()
    pools.zero_()
    with loader.written_late(QKV, qkv):
        assert torch.equal(stage.qk_norm_rope_store(qkv, inputs), expected[0])
    assert torch.equal(pools, expected[1])


@pytest.mark.parametrize("lengths", [(1,), (64, 1, 257), (16, 17, 130, 320, 5)], ids=str)
@pytest.mark.parametrize("num_sms", [1, 3])
def test_decode_attention_waits_for_queries_and_newest_keys(
    loader: SimulatedLoader, num_sms: int, lengths: tuple[int, ...]
) -> None:
    case = AttentionCase(replace(SHAPE, windows=(-1,)))
    device = DeviceSize(num_sms, 227 << 10, "sm_90")
    backend = DecodeAttention(case.config(), loader, device, lambda *_: AttentionPlan(4, 1))
    batch, q = case.decode(newest(lengths)), case.queries(len(lengths)).contiguous()
    assert batch.out_loc is not None
    slots = batch.out_loc.tolist()
    pools = (case.pool.k_slots(0), case.pool.v_slots(0))
    with loader.written_late(ATTENTION, q, *(pool[slot] for pool in pools for slot in slots)):
        out = backend.forward(q, 0, batch)
    assert_close(out, case.expected(q, batch), BF16, "what comes late is waited for", "attention")


@pytest.mark.parametrize(
    ("unit", "rows", "is_gated"),
    [
        (LINEAR, 3, False),
        (LINEAR_BATCH, 20, False),
        (LINEAR_MANY, 20, False),
        (LINEAR_WIDE, 20, True),
    ],
    ids=lambda value: value.name if isinstance(value, Unit) else str(value),
)
def test_products_wait_for_their_rows(
    loader: SimulatedLoader, unit: Unit, rows: int, is_gated: bool
) -> None:
    x, weight = make(rows, 1024, dtype=BF16), make(64, 1024, dtype=BF16, seed=1)
    if unit in (LINEAR_MANY, LINEAR_WIDE):
        kernels: LinearKernels = LargeKernels(loader, BF16, is_wide=unit == LINEAR_WIDE)
    else:
        device = replace(H200, arch="sm_80") if unit == LINEAR else H200
        kernels = LinearKernels(loader, BF16, device, 64, build_activations(loader, BF16))
    if is_gated:
        product = kernels.pack_gated_linear(weight, None, "silu")
    else:
        product = kernels.pack_linear(weight, None)
    expected = product(x)
    with loader.written_late(unit, x):
        assert torch.equal(product(x), expected)
