"""Decode attention on the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from minisgl.testing.attention_case import AttentionCase, AttentionShape
from minisgl.testing.paged_batches import newest
from minisgl.testing.reference import assert_close
from minisgl_kernels_cuda.attention import DecodeAttention
from minisgl_kernels_cuda.attention_plan import AttentionPlan, choose_plan
from minisgl_kernels_cuda.units import DeviceSize, Loader
from tests.kernels_cuda.reference import BF16, F16, F32

SHAPE = AttentionShape(head_dim=128, dtype=BF16, max_reqs=17, max_seq_len=320)
RAGGED = (257, 1, 31, 64, 65, 130, 16, 17, 300, 2, 48, 63, 128, 5, 200, 15, 33)
USUAL = AttentionPlan(warps=4, blocks_per_sm=1)


def make(
    loader: Loader, case: AttentionCase, plan: AttentionPlan = USUAL, num_sms: int = 5
) -> DecodeAttention:
    device = DeviceSize(num_sms, 227 << 10, "sm_90")
    return DecodeAttention(case.config(), loader, device, lambda *_: plan)


def check(backend: DecodeAttention, case: AttentionCase, seq_lens: Sequence[int]) -> None:
    batch, q = case.decode(newest(seq_lens)), case.queries(len(seq_lens))
    backend.prepare_metadata(batch)
    for layer_id in range(len(case.shape.windows)):
        out = backend.forward(q, layer_id, batch)
        expected = case.expected(q, batch, layer_id)
        assert_close(out, expected, case.shape.dtype, f"layer {layer_id}", "attention")


@pytest.mark.parametrize("seq_lens", [(1,), (31,), (64,), (257,), (64, 1, 257), RAGGED], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_requests_of_any_length_are_near_the_reference(
    loader: Loader, head_dim: int, seq_lens: tuple[int, ...]
) -> None:
    case = AttentionCase(replace(SHAPE, head_dim=head_dim))
    check(make(loader, case), case, seq_lens)


# More than a warp has lanes, so that some of them add up several lengths.
@pytest.mark.parametrize("num_sms", [2, 30])
def test_a_batch_may_have_many_requests(loader: Loader, num_sms: int) -> None:
    case = AttentionCase(replace(SHAPE, head_dim=64, num_qo_heads=2, max_reqs=70, max_seq_len=96))
    check(make(loader, case, num_sms=num_sms), case, [1 + 37 * i % 96 for i in range(70)])


@pytest.mark.parametrize("page_size", [1, 5, 16, 64])
def test_pages_may_have_any_size(loader: Loader, page_size: int) -> None:
    case = AttentionCase(replace(SHAPE, head_dim=64, page_size=page_size))
    check(make(loader, case), case, (64, 1, 257))


@pytest.mark.parametrize("ratio", [1, 2, 5, 7, 8, 9, 16])
def test_any_number_of_query_heads_share_keys_and_values(loader: Loader, ratio: int) -> None:
    case = AttentionCase(replace(SHAPE, num_qo_heads=2 * ratio))
    check(make(loader, case), case, (64, 1, 257))


@pytest.mark.parametrize("dtype", [F16, F32])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_other_types_are_near_the_reference(
    loader: Loader, head_dim: int, dtype: torch.dtype
) -> None:
    case = AttentionCase(replace(SHAPE, head_dim=head_dim, dtype=dtype, num_qo_heads=10))
    check(make(loader, case), case, (64, 1, 257, 130))


@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize("blocks_per_sm", [1, 2, 3])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_layout_gives_the_same(
    loader: Loader, head_dim: int, warps: int, blocks_per_sm: int
) -> None:
    case = AttentionCase(replace(SHAPE, head_dim=head_dim))
    plan = AttentionPlan(warps, blocks_per_sm)
    check(make(loader, case, plan, num_sms=3), case, (200, 1, 320, 17, 64))


# Divided by chunks, and by chunks and ends.
@pytest.mark.parametrize("plan", [AttentionPlan(8, 1), AttentionPlan(4, 3, True)], ids=str)
@pytest.mark.parametrize("num_sms", [1, 2, 3, 7, 20, 40])
def test_any_number_of_blocks_shares_the_keys(
    loader: Loader, num_sms: int, plan: AttentionPlan
) -> None:
    case = AttentionCase(replace(SHAPE, head_dim=64, windows=(-1, 50)))
    check(make(loader, case, plan, num_sms), case, RAGGED)


@pytest.mark.parametrize("seq_lens", [(1,), (16, 1), (1,) * 17, (65, 33, 17)], ids=str)
def test_few_chunks_are_divided_over_many_blocks(loader: Loader, seq_lens: tuple[int, ...]) -> None:
    case = AttentionCase(replace(SHAPE, head_dim=64))
    check(make(loader, case, AttentionPlan(4, 3, True), 40), case, seq_lens)


def test_each_layer_has_its_own_window_scale_and_pool(loader: Loader) -> None:
    case = AttentionCase(replace(SHAPE, windows=(-1, 0, 5, 63, -1, 200)))
    check(make(loader, case), case, (64, 1, 257, 320))


def test_calls_can_be_repeated(loader: Loader) -> None:
    case = AttentionCase(SHAPE)
    backend = make(loader, case)
    for seq_lens in ((320,), (257, 64, 1), (320,), RAGGED, (5,)):
        check(backend, case, seq_lens)


def test_rows_of_padding_are_finite(loader: Loader) -> None:
    case = AttentionCase(SHAPE)
    batch, q = case.decode(newest((300, 20)), padded_size=5), case.queries(5)
    assert batch.seq_lens is not None
    batch.seq_lens[4] = 0
    out = make(loader, case).forward(q, 0, batch)
    assert_close(out[:2], case.expected(q, batch), BF16, "rows of requests", "attention")
    assert out.isfinite().all()


@pytest.mark.parametrize("length", [37, 301])  # of a tile at the head of the queue, or later
def test_what_lies_behind_a_request_is_not_read(loader: Loader, length: int) -> None:
    case = AttentionCase(SHAPE)
    batch, q = case.decode(newest((length,))), case.queries(1)
    expected = case.expected(q, batch)
    slots = torch.from_numpy(case.batches.slots(newest((length,))[0]._replace(cached_len=0)))
    keep = case.pool.k_slots(0)[slots].clone(), case.pool.v_slots(0)[slots].clone()
    for pool, own in zip((case.pool.k_slots(0), case.pool.v_slots(0)), keep, strict=True):
        pool.fill_(float("nan"))
        pool[slots] = own
    assert_close(make(loader, case).forward(q, 0, batch), expected, BF16, "nan", "attention")


# From scores that are nearly equal to such that one key takes all.
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("factor", [0.125, 4.0, 16.0, 48.0])
def test_scores_may_differ_by_little_or_by_much(
    loader: Loader, factor: float, dtype: torch.dtype
) -> None:
    case = AttentionCase(replace(SHAPE, head_dim=64, dtype=dtype))
    batch, q = case.decode(newest((320, 45, 257, 64))), case.queries(4) * factor
    out = make(loader, case).forward(q, 0, batch)
    assert_close(out, case.expected(q, batch), dtype, f"queries times {factor}", "attention")


def test_scores_may_be_so_great_that_small_sums_with_them_are_rounded(loader: Loader) -> None:
    # Between 2^27 and 2^28 (times log2(e)) float32 steps are 16: a later tile's score is one more.
    case = AttentionCase(AttentionShape(1, 1, dtype=F16, max_seq_len=128))
    q = torch.full((8, 1, 64), 4096.0, dtype=F16)
    q[:, :, -1] = 1
    for step in newest([128] * 8):
        slots = torch.from_numpy(case.batches.slots(step._replace(cached_len=0)))
        keys = torch.full((128, 1, 64), 4096.0, dtype=F16)
        keys[:64, :, -1], keys[64:, :, -1] = 64 * step.row, 64 * step.row + 64
        case.pool.k_slots(0)[slots] = keys
    out = make(loader, case, num_sms=1).forward(q, 0, case.decode(newest([128] * 8)))
    assert out.isfinite().all()


def test_queries_that_are_not_aligned_are_copied(loader: Loader) -> None:
    case = AttentionCase(SHAPE)
    batch = case.decode(newest((37, 99)))
    odd = torch.empty(2 * 4 * 128 + 1, dtype=BF16)[1:].view(2, 4, 128)
    odd.copy_(case.queries(2))
    out = make(loader, case).forward(odd, 0, batch)
    assert_close(out, case.expected(odd, batch), BF16, "odd queries", "attention")


@pytest.mark.parametrize(
    ("num_pairs", "layout"),
    [
        (1, (8, 1)), (33, (8, 1)), (34, (4, 1)), (66, (4, 1)), (67, (4, 2)), (132, (4, 2)),
        (133, (4, 3)), (2048, (4, 3)),
    ],
)  # fmt: skip
def test_layouts_are_those_that_an_h200_was_fastest_with(
    num_pairs: int, layout: tuple[int, int]
) -> None:
    plan = choose_plan(num_pairs, 132)
    assert (plan.warps, plan.blocks_per_sm) == layout
