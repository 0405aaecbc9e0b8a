"""Our prefill attention on a real Hopper GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.testing.attention_case import AttentionCase, AttentionShape
from minisgl.testing.paged_batches import Step
from minisgl.testing.reference import assert_close, attend
from minisgl_kernels_cuda.attention import CudaAttention, build_attention
from tests.kernels_cuda.prefill_check import check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a CUDA device of compute capability 9.0",
    ),
]

SHAPE = AttentionShape(
    num_qo_heads=16, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16, device="cuda",
    max_seq_len=1024, max_reqs=17,
)  # fmt: skip
LONG = replace(SHAPE, max_seq_len=8192, max_reqs=4)
# Whole prompts of many lengths, one token behind a prefix, chunks.
MIXED = (
    Step(3, 0, 37), Step(0, 0, 1), Step(5, 64, 97), Step(1, 71, 72), Step(2, 130, 300),
    Step(4, 255, 257), Step(6, 0, 1024), Step(7, 1023, 1024), Step(8, 512, 1000), Step(9, 3, 640),
)  # fmt: skip


def make(case: AttentionCase) -> CudaAttention:
    pytest.importorskip("cuda.core", reason="needs cuda-core and NVRTC", exc_type=ImportError)
    backend = build_attention(case.config())
    assert isinstance(backend, CudaAttention)
    return backend


@pytest.mark.parametrize("heads", [(16, 8), (40, 8), (32, 4), (7, 1), (16, 1), (8, 8), (33, 1)])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shapes_of_real_models_are_near_the_reference(
    head_dim: int, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    shape = replace(SHAPE, head_dim=head_dim, num_qo_heads=heads[0], num_kv_heads=heads[1])
    case = AttentionCase(replace(shape, dtype=dtype, windows=(-1, 100)))
    check(make(case), case, MIXED)


@pytest.mark.parametrize("page_size", [1, 2, 4, 5, 8, 16, 48, 64, 128, 192, 256])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_page_sizes_are_near_the_reference(head_dim: int, page_size: int) -> None:
    case = AttentionCase(replace(SHAPE, page_size=page_size, head_dim=head_dim, windows=(-1, 77)))
    check(make(case), case, MIXED)


@pytest.mark.parametrize("window", [0, 1, 63, 127, 128, 129, 500])
def test_windows_are_near_the_reference(window: int) -> None:
    case = AttentionCase(replace(SHAPE, num_qo_heads=40, windows=(window,)))
    check(make(case), case, MIXED)


@pytest.mark.parametrize("num_tokens", [1, 25, 26, 64, 128, 129, 500, 511, 512])
def test_many_requests_of_one_length_are_near_the_reference(num_tokens: int) -> None:
    shape = replace(SHAPE, num_qo_heads=40, max_reqs=24, max_seq_len=640)
    case = AttentionCase(shape)
    for cached in (0, 100):
        check(make(case), case, [Step(i, cached, cached + num_tokens) for i in range(24)])


@pytest.mark.parametrize("heads", [(40, 8), (16, 8), (8, 8)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_long_prompts_are_near_the_reference(head_dim: int, heads: tuple[int, int]) -> None:
    case = AttentionCase(
        replace(
            SHAPE, head_dim=head_dim, num_qo_heads=heads[0], num_kv_heads=heads[1],
            max_seq_len=8192, max_reqs=2,
        )
    )  # fmt: skip
    backend, batch = make(case), case.prefill([Step(0, 0, 8192), Step(1, 4096, 8000)])
    q = case.queries(8192 + 3904)
    out = backend.forward(q, 0, batch)
    # The whole table of scores in float64 would take gigabytes: some heads at a time.
    for start, (row, cached, end) in zip((0, 8192), ((0, 0, 8192), (1, 4096, 8000)), strict=True):
        compare_rows(case, q[start:], out[start:], row, cached, end)


@pytest.mark.parametrize("heads", [(8, 8), (16, 8), (40, 8), (8, 1), (2, 2)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_few_tokens_behind_many_are_near_the_reference(
    head_dim: int, heads: tuple[int, int]
) -> None:
    shape = replace(LONG, head_dim=head_dim, num_qo_heads=heads[0], num_kv_heads=heads[1])
    case = AttentionCase(replace(shape, windows=(-1, 4000)))
    backend = make(case)
    for num_tokens in (1, 3, 20, 200):
        check(backend, case, [Step(0, 8192 - num_tokens, 8192)])
    check(backend, case, [Step(row, 4096 - 64 * row, 4096) for row in range(1, 4)])
    check(backend, case, [Step(0, 0, 300), Step(1, 8000, 8020), Step(2, 5, 100), Step(3, 511, 512)])


def test_split_requests_give_the_same_bits_every_time() -> None:
    case = AttentionCase(replace(LONG, windows=(-1, 5000)))
    backend, batch = make(case), case.prefill([Step(0, 8000, 8020), Step(1, 3000, 3100)])
    q = case.queries(120)
    first = [backend.forward(q, layer_id, batch) for layer_id in range(2)]
    for _ in range(200):
        outs = [backend.forward(q, layer_id, batch) for layer_id in range(2)]
        for out, before in zip(outs, first, strict=True):
            assert torch.equal(out, before)


def compare_rows(
    case: AttentionCase, q: Tensor, out: Tensor, row: int, cached: int, end: int
) -> None:
    """Compare blocks of tokens of a request, each with the keys in front of it."""
    keys, values = case._keys[0, row], case._values[0, row]
    scale = case.layer(0).sm_scale
    for first in range(cached, end, 509):
        last = min(first + 509, end)
        at = slice(first - cached, last - cached)
        expected = attend(q[at], keys[:last], values[:last], scale)
        assert_close(out[at], expected, case.shape.dtype, f"tokens from {first}", "attention")


def test_calls_give_the_same_bits_every_time() -> None:
    case = AttentionCase(replace(SHAPE, windows=(-1, -1, 64)))
    backend, batch = make(case), case.prefill(MIXED)
    q = case.queries(sum(step.seq_len - step.cached_len for step in MIXED))
    first = [backend.forward(q, layer_id, batch) for layer_id in range(3)]
    for _ in range(100):
        outs = [backend.forward(q, layer_id, batch) for layer_id in range(3)]
        for out, before in zip(outs, first, strict=True):
            assert torch.equal(out, before)


def test_what_nobody_owns_is_not_used() -> None:
    case = AttentionCase(SHAPE)
    batch, q = case.prefill([Step(2, 0, 37), Step(3, 100, 170)]), case.queries(107)
    expected = case.expected(q, batch)
    owned = [case.batches.slots(Step(row, 0, end)) for row, end in ((2, 37), (3, 170))]
    slots = torch.from_numpy(np.concatenate(owned)).cuda()
    for pool in (case.pool.k_slots(0), case.pool.v_slots(0)):
        own = pool[slots].clone()
        pool.fill_(float("nan"))
        pool[slots] = own
    assert_close(make(case).forward(q, 0, batch), expected, torch.bfloat16, "nan", "attention")
