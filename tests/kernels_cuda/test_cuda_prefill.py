"""Prefill attention on the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch

from minisgl.errors import PluginError
from minisgl.testing.attention_case import AttentionCase, AttentionShape
from minisgl.testing.paged_batches import Step
from minisgl.testing.reference import assert_close
from minisgl_kernels_cuda.attention import CudaAttention, DecodeAttention, combine
from minisgl_kernels_cuda.attention_prefill import PrefillAttention
from minisgl_kernels_cuda.units import (
    MATRIX_MAP_BYTES,
    DeviceSize,
    HeadsShape,
    Launch,
    Loader,
    Unit,
)
from tests.kernels_cuda.prefill_check import check
from tests.kernels_cuda.reference import BF16, F16, F32

HOPPER = DeviceSize(3, 227 << 10, "sm_90a")
LARGE_HOPPER = replace(HOPPER, num_sms=20)
SHAPE = AttentionShape(head_dim=64, dtype=BF16, max_seq_len=320)
# Whole prompts, one token, and chunks behind a prefix that ends inside or at the end of a page.
MIXED = (Step(3, 0, 37), Step(0, 0, 1), Step(5, 64, 97), Step(1, 71, 72), Step(2, 130, 260))


LONG = replace(SHAPE, max_seq_len=1100, max_reqs=4)


class IdleLoader(Loader):
    """Kernels that do nothing, at once."""

    def load(self, unit: Unit, dtype: torch.dtype) -> Mapping[str, Launch]:
        def launch(*args: object, **options: object) -> None:
            """Do nothing."""

        return dict.fromkeys(unit.entries, launch)

    def matrix_map(self, address: int, num_rows: int, num_columns: int, box_rows: int) -> bytes:
        return bytes(MATRIX_MAP_BYTES)

    def heads_map(self, address: int, shape: HeadsShape, box: tuple[int, int]) -> bytes:
        return bytes(MATRIX_MAP_BYTES)


def make(loader: Loader, case: AttentionCase, device: DeviceSize = HOPPER) -> PrefillAttention:
    return PrefillAttention(case.config(), loader, device)


@pytest.mark.parametrize("dtype", [BF16, pytest.param(F16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("ratio", [1, 5, 8])
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
        *((Step(0, 0, n), Step(1, 0, 320 - n)) for n in (31, 64, 65, 127, 128, 129)),
        # Rows of one token, and more requests than a warp looks at together.
        (Step(2, 0, 320), Step(1, 319, 320), Step(0, 0, 1)),
        tuple(Step(i, i % 5, i % 5 + 1 + i % 3) for i in range(40)),
    ],
    ids=lambda steps: f"{len(steps)} requests, {steps[0].seq_len}",
)
def test_requests_of_any_length_are_near_the_reference(
    loader: Loader, steps: Sequence[Step]
) -> None:
    case = AttentionCase(replace(SHAPE, max_reqs=max(step.row for step in steps) + 1))
    check(make(loader, case), case, steps)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_request_without_new_tokens_takes_no_rows(loader: Loader, at: int) -> None:
    case = AttentionCase(SHAPE)
    steps = [Step(0, 0, 40), Step(2, 120, 140)]
    steps.insert(at, Step(1, 77, 77))
    backend = make(loader, case)
    for _ in range(2):
        check(backend, case, steps)


def test_each_layer_has_its_own_window_scale_and_pool(loader: Loader) -> None:
    case = AttentionCase(replace(SHAPE, windows=(-1, 0, 63, 127, 128, 200)))
    check(make(loader, case), case, (*MIXED[2:], Step(6, 250, 320)))


def test_calls_can_be_repeated(loader: Loader) -> None:
    case = AttentionCase(SHAPE)
    backend = make(loader, case)
    for steps in (MIXED, MIXED[1:2], MIXED[3::-1]):
        check(backend, case, steps)


@pytest.mark.parametrize(
    ("ratio", "head_dim"),
    [
        *((1, 64), (5, 128), (8, 64)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 128), (5, 64), (8, 128))),
    ],
)
def test_few_tokens_behind_many_are_near_the_reference(
    loader: Loader, ratio: int, head_dim: int
) -> None:
    shape = replace(LONG, num_qo_heads=2 * ratio, head_dim=head_dim, windows=(-1, 800))
    case = AttentionCase(shape)
    backend = make(loader, case, LARGE_HOPPER)
    for steps in (
        (Step(0, 1099, 1100),),
        (Step(1, 1017, 1020), Step(2, 0, 3), Step(0, 767, 787)),
    ):
        check(backend, case, steps)


def test_requests_are_split_by_their_own_lengths(loader: Loader) -> None:
    case = AttentionCase(replace(LONG, num_qo_heads=2))
    backend = make(loader, case, LARGE_HOPPER)
    # Of a request's jobs, of 128 tokens here, the first has the fewest keys.
    prompt, chunk, reply = Step(0, 0, 300), Step(1, 700, 990), Step(3, 1090, 1100)
    for steps in ((prompt, chunk, reply), (reply, prompt), (chunk,)):
        check(backend, case, steps)


def test_requests_far_apart_are_split_apart(loader: Loader) -> None:
    case = AttentionCase(replace(LONG, num_qo_heads=2, num_kv_heads=1, max_reqs=34))
    steps = (Step(0, 1090, 1100), *(Step(i, 0, 1) for i in range(1, 33)), Step(33, 1080, 1099))
    backend = make(loader, case, LARGE_HOPPER)
    for _ in range(2):
        check(backend, case, steps)


def test_who_comes_last_changes_no_bit(loader: Loader) -> None:
    case = AttentionCase(LONG)
    backend, batch = make(loader, case, LARGE_HOPPER), case.prefill([Step(0, 1080, 1100)])
    q = case.queries(20)
    first = backend.forward(q, 0, batch)
    assert torch.equal(backend.forward(q, 0, batch), first), "blocks came in another order"


def test_a_job_is_split_where_the_device_would_be_idle(loader: Loader) -> None:
    case = AttentionCase(LONG)
    batch, q = case.prefill([Step(0, 1080, 1100)]), case.queries(20)
    # Sums of parts are rounded otherwise than those of a whole.
    whole, of_two, of_three = (
        make(loader, case, replace(HOPPER, num_sms=num_sms)).forward(q, 0, batch)
        for num_sms in (2, 4, 20)
    )
    assert not torch.equal(whole, of_two), "two KV heads, four multiprocessors"
    assert not torch.equal(of_two, of_three), "at least three tiles of nine to a part"


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
    arch: str, dtype: torch.dtype, has_prefill: bool
) -> None:
    config = AttentionCase(replace(SHAPE, dtype=dtype)).config()
    backend = combine(config, IdleLoader(), replace(HOPPER, arch=arch))
    assert isinstance(backend, CudaAttention if has_prefill else DecodeAttention)


def test_decode_is_served_where_prefill_has_too_many_query_heads() -> None:
    config = AttentionCase(replace(SHAPE, num_qo_heads=129, num_kv_heads=1)).config()
    assert isinstance(combine(config, IdleLoader(), HOPPER), DecodeAttention)


def test_a_backend_of_both_phases_serves_both(loader: Loader) -> None:
    case = AttentionCase(SHAPE)
    backend = combine(case.config(), loader, HOPPER)
    steps = [Step(0, 99, 100), Step(1, 7, 8)]
    q = case.queries(2)
    for batch in (case.prefill(steps), case.decode(steps)):
        backend.prepare_metadata(batch)
        out = backend.forward(q, 0, batch)
        assert_close(out, case.expected(q, batch), BF16, batch.phase, "attention")
