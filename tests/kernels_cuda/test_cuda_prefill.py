"""Prefill attention on the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from minisgl.errors import PluginError
from minisgl.testing.attention_case import AttentionCase, AttentionShape
from minisgl.testing.paged_batches import Step
from minisgl.testing.reference import assert_close
from minisgl_kernels_cuda.attention import CudaAttention, DecodeAttention, combine
from minisgl_kernels_cuda.attention_prefill import PrefillAttention
from minisgl_kernels_cuda.units import DeviceSize, Loader
from tests.kernels_cuda.reference import BF16, F16, F32

HOPPER = DeviceSize(3, 227 << 10, "sm_90a")
SHAPE = AttentionShape(head_dim=64, dtype=BF16, max_seq_len=320)
# Whole prompts, one token, and chunks behind a prefix that ends inside or at the end of a page.
MIXED = (Step(3, 0, 37), Step(0, 0, 1), Step(5, 64, 97), Step(1, 71, 72), Step(2, 130, 300))


def make(loader: Loader, case: AttentionCase) -> PrefillAttention:
    return PrefillAttention(case.config(), loader, HOPPER)


def check(backend: PrefillAttention, case: AttentionCase, steps: Sequence[Step]) -> None:
    batch = case.prefill(steps)
    q = case.queries(sum(step.seq_len - step.cached_len for step in steps))
    backend.prepare_metadata(batch)
    for layer_id in range(len(case.shape.windows)):
        out = backend.forward(q, layer_id, batch)
        expected = case.expected(q, batch, layer_id)
        assert_close(out, expected, case.shape.dtype, f"layer {layer_id}", "attention")


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("ratio", [1, 2, 5, 8])
def test_heads_share_keys_and_values(
    loader: Loader, ratio: int, head_dim: int, dtype: torch.dtype
) -> None:
    case = AttentionCase(replace(SHAPE, num_qo_heads=2 * ratio, head_dim=head_dim, dtype=dtype))
    check(make(loader, case), case, MIXED)


@pytest.mark.parametrize("ratio", [3, 71, 128])
def test_a_job_has_as_many_tokens_as_fit(loader: Loader, ratio: int) -> None:
    case = AttentionCase(replace(SHAPE, num_qo_heads=ratio, num_kv_heads=1))
    check(make(loader, case), case, (Step(0, 5, 9), Step(1, 0, 3)))


@pytest.mark.parametrize("page_size", [1, 4, 5, 16, 48, 64, 192])
def test_pages_may_have_any_size(loader: Loader, page_size: int) -> None:
    case = AttentionCase(replace(SHAPE, head_dim=128, page_size=page_size))
    check(make(loader, case), case, MIXED[2:])


@pytest.mark.parametrize(
    "steps",
    [
        # Keys that end in each quarter of a tile, and around the ends of tiles.
        *(
            (Step(0, 0, n), Step(1, 0, 320 - n))
            for n in (16, 31, 33, 64, 65, 96, 97, 127, 128, 129)
        ),
        # Rows of one token, and more requests than a warp looks at together.
        (Step(2, 0, 320), Step(1, 319, 320), Step(0, 0, 1)),
        tuple(Step(i, i % 5, i % 5 + 1 + i % 3) for i in range(70)),
    ],
    ids=lambda steps: f"{len(steps)} requests, {steps[0].seq_len}",
)
def test_requests_of_any_length_are_near_the_reference(
    loader: Loader, steps: Sequence[Step]
) -> None:
    case = AttentionCase(replace(SHAPE, max_reqs=max(step.row for step in steps) + 1))
    check(make(loader, case), case, steps)


def test_each_layer_has_its_own_window_scale_and_pool(loader: Loader) -> None:
    case = AttentionCase(replace(SHAPE, num_qo_heads=10, windows=(-1, 0, 5, 63, 127, 128, 200)))
    check(make(loader, case), case, (*MIXED, Step(6, 200, 320)))


def test_calls_can_be_repeated(loader: Loader) -> None:
    case = AttentionCase(SHAPE)
    backend = make(loader, case)
    for steps in (MIXED, MIXED[1:2], MIXED[::-1], MIXED[4:]):
        check(backend, case, steps)


@pytest.mark.parametrize("cached", [0, 100])
def test_what_lies_behind_a_request_is_not_used(loader: Loader, cached: int) -> None:
    case = AttentionCase(replace(SHAPE, head_dim=128))
    batch, q = case.prefill([Step(2, cached, 137)]), case.queries(137 - cached)
    expected = case.expected(q, batch)
    slots = torch.from_numpy(case.batches.slots(Step(2, 0, 137)))
    for pool in (case.pool.k_slots(0), case.pool.v_slots(0)):
        own = pool[slots].clone()
        pool.fill_(float("nan"))
        pool[slots] = own
    assert_close(make(loader, case).forward(q, 0, batch), expected, BF16, "nan", "attention")


def test_queries_that_are_not_aligned_are_copied(loader: Loader) -> None:
    case = AttentionCase(SHAPE)
    batch = case.prefill([Step(0, 0, 5), Step(1, 90, 99)])
    odd = torch.empty(14 * 4 * 64 + 1, dtype=BF16)[1:].view(14, 4, 64)
    odd.copy_(case.queries(14))
    out = make(loader, case).forward(odd, 0, batch)
    assert_close(out, case.expected(odd, batch), BF16, "odd queries", "attention")


def test_too_many_query_heads_are_refused(loader: Loader) -> None:
    case = AttentionCase(replace(SHAPE, num_qo_heads=129, num_kv_heads=1))
    with pytest.raises(PluginError, match="at most 128 query heads per KV head, the model has 129"):
        make(loader, case)


@pytest.mark.parametrize("scale", [0.0, -0.1])
def test_a_scale_that_is_not_positive_is_refused(loader: Loader, scale: float) -> None:
    config = AttentionCase(SHAPE).config()
    config = replace(config, layers=(replace(config.layers[0], sm_scale=scale),))
    with pytest.raises(PluginError, match=f"layer 0 scales scores by {scale}"):
        PrefillAttention(config, loader, HOPPER)


@pytest.mark.parametrize(
    ("arch", "dtype", "has_prefill"),
    [("sm_90a", BF16, True), ("sm_90a", F32, False), ("sm_80", BF16, False)],
)
def test_prefill_is_served_where_there_is_a_kernel(
    loader: Loader, arch: str, dtype: torch.dtype, has_prefill: bool
) -> None:
    config = AttentionCase(replace(SHAPE, dtype=dtype)).config()
    backend = combine(config, loader, replace(HOPPER, arch=arch))
    assert isinstance(backend, CudaAttention if has_prefill else DecodeAttention)


def test_a_backend_of_both_phases_serves_both(loader: Loader) -> None:
    case = AttentionCase(SHAPE)
    backend = combine(case.config(), loader, HOPPER)
    steps = [Step(0, 99, 100), Step(1, 7, 8)]
    q = case.queries(2)
    for batch in (case.prefill(steps), case.decode(steps)):
        backend.prepare_metadata(batch)
        out = backend.forward(q, 0, batch)
        assert_close(out, case.expected(q, batch), BF16, batch.phase, "attention")
