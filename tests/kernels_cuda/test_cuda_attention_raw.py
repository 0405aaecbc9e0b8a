"""Decode attention to heads as the q/k/v product leaves them, on the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from minisgl.testing.attention_case import AttentionCase, AttentionShape
from minisgl.testing.paged_batches import newest
from minisgl.testing.reference import assert_close
from minisgl_kernels_cuda.attention import DecodeAttention
from minisgl_kernels_cuda.attention_plan import AttentionPlan
from minisgl_kernels_cuda.units import DeviceSize, Loader
from tests.kernels_cuda.reference import BF16, F16, F32

SHAPE = AttentionShape(head_dim=128, dtype=BF16, max_reqs=17, max_seq_len=320)
RAGGED = (257, 1, 31, 64, 65, 130, 16, 17, 300, 2, 48, 63, 128, 5, 200, 15, 33)
USUAL = AttentionPlan(warps=4, blocks_per_sm=1)


def make(
    loader: Loader, case: AttentionCase, plan: AttentionPlan = USUAL, num_sms: int = 5
) -> DecodeAttention:
    device = DeviceSize(num_sms, 227 << 10, "sm_90")
    return DecodeAttention(case.config(qkv_set="cuda"), loader, device, lambda *_: plan)


def check(
    backend: DecodeAttention, case: AttentionCase, seq_lens: Sequence[int], has_norm: bool = True
) -> None:
    """Compare results and the pool; nothing else in the pool may change."""
    batch, dtype = case.decode(newest(seq_lens)), case.shape.dtype
    for layer_id in range(len(case.shape.windows)):
        raw = case.raw(batch, layer_id, has_norm)
        pools, slots = (raw.inputs.k_pool, raw.inputs.v_pool), raw.inputs.out_loc
        expected_pools = [pool.clone() for pool in pools]
        out = backend.forward_raw(raw.qkv, raw.inputs, layer_id, batch)
        assert out is not None
        rule = f"layer {layer_id}"
        assert_close(out, case.expected(raw.q, batch, layer_id), dtype, rule, "attention")
        assert_close(pools[0][slots], raw.k.double(), dtype, rule, "qk_norm_rope_store")
        assert torch.equal(pools[1][slots], raw.v)
        for pool, expected in zip(pools, expected_pools, strict=True):
            expected[slots] = pool[slots]
            assert torch.equal(pool, expected), "another slot was written"


@pytest.mark.parametrize("seq_lens", [(1,), (31,), (64,), (257,), (64, 1, 257), RAGGED], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_requests_of_any_length(
    loader: Loader, dtype: torch.dtype, head_dim: int, seq_lens: tuple[int, ...]
) -> None:
    case = AttentionCase(replace(SHAPE, head_dim=head_dim, dtype=dtype))
    check(make(loader, case), case, seq_lens)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_models_without_norms_of_heads(loader: Loader, dtype: torch.dtype) -> None:
    case = AttentionCase(replace(SHAPE, dtype=dtype))
    check(make(loader, case), case, (64, 1, 257), has_norm=False)


@pytest.mark.parametrize("page_size", [1, 5, 16, 64])
def test_pages_of_any_size(loader: Loader, page_size: int) -> None:
    case = AttentionCase(replace(SHAPE, head_dim=64, page_size=page_size))
    check(make(loader, case), case, (64, 1, 257))


@pytest.mark.parametrize("ratio", [1, 2, 5, 8, 9, 16])
def test_any_number_of_query_heads(loader: Loader, ratio: int) -> None:
    case = AttentionCase(replace(SHAPE, num_qo_heads=2 * ratio))
    check(make(loader, case), case, (64, 1, 257))


# Divided by chunks, and by chunks and ends.
@pytest.mark.parametrize("plan", [AttentionPlan(8, 1), AttentionPlan(4, 3, True)], ids=str)
@pytest.mark.parametrize("num_sms", [1, 3, 20])
def test_any_number_of_blocks_in_layers_with_windows(
    loader: Loader, num_sms: int, plan: AttentionPlan
) -> None:
    case = AttentionCase(replace(SHAPE, head_dim=64, windows=(-1, 50, 0)))
    check(make(loader, case, plan, num_sms), case, RAGGED)


def test_a_row_of_padding_writes_to_the_dummy_page(loader: Loader) -> None:
    case = AttentionCase(SHAPE)
    batch = case.decode(newest((300, 20)), padded_size=5)
    raw = case.raw(batch)
    out = make(loader, case).forward_raw(raw.qkv, raw.inputs, 0, batch)
    assert out is not None
    assert_close(out[:2], case.expected(raw.q, batch), BF16, "rows of requests", "attention")
    assert out.isfinite().all()


@pytest.mark.parametrize("why", ["another set's op", "half of each head rotated", "one norm"])
def test_what_is_not_its_own_is_left_to_the_op(loader: Loader, why: str) -> None:
    case = AttentionCase(SHAPE)
    batch = case.decode(newest((64, 1)))
    raw, backend = case.raw(batch), make(loader, case)
    inputs = raw.inputs
    if why == "another set's op":
        backend = DecodeAttention(case.config(qkv_set="fi"), loader, DeviceSize(5, 227 << 10, ""))
    elif why == "one norm":
        inputs = inputs._replace(k_norm=None)
    else:
        inputs = inputs._replace(cos_sin_cache=inputs.cos_sin_cache[:, ::2].contiguous())
    pool = inputs.k_pool.clone()
    assert backend.forward_raw(raw.qkv, inputs, 0, batch) is None
    assert torch.equal(inputs.k_pool, pool)
