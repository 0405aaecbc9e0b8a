"""Decode attention on a CPU: groups of requests, keys in place, shared prefixes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.attention.cpu_decode import CpuDecodePlan, plan_cpu_decode, run_cpu_decode

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16
# float32 sums of at most 1200 products of order one.
TOLERANCE = 2e-5


def make_table(
    lens: list[int], page_size: int, shared: list[int], is_scattered: bool
) -> np.ndarray:
    """Give each request pages of its own, but the first ``shared`` pages of request 0."""
    counts = [-(-n // page_size) for n in lens]
    num_pages = sum(counts)
    order = (
        np.random.default_rng(1).permutation(num_pages) if is_scattered else np.arange(num_pages)
    )
    table, used = np.full((len(lens), max(counts)), -1, dtype=np.int32), 0
    for row, count in enumerate(counts):
        table[row, :count] = order[used : used + count]
        table[row, : shared[row]] = table[0, : shared[row]]
        used += count
    return table


def run(
    lens: list[int],
    page_size: int = 4,
    shared: list[int] | None = None,
    is_scattered: bool = True,
    window_left: int = -1,
) -> tuple[CpuDecodePlan, Tensor, Tensor]:
    """Return plan, result and float64 reference; slots that nobody sees hold nan."""
    table = make_table(lens, page_size, shared or [0] * len(lens), is_scattered)
    gen = torch.Generator().manual_seed(0)
    shape = (int(table.max()) + 2, page_size, KV_HEADS, HEAD_DIM)
    k_pool, v_pool = (torch.randn(shape, generator=gen) for _ in range(2))
    q = torch.randn(len(lens), HEADS, HEAD_DIM, generator=gen)
    expected = torch.zeros(q.shape, dtype=torch.float64)
    is_seen = torch.zeros(shape[0] * page_size, dtype=torch.bool)
    for row, length in enumerate(lens):
        tokens = np.arange(0 if window_left < 0 else max(0, length - 1 - window_left), length)
        slots = torch.from_numpy(table[row, tokens // page_size] * page_size + tokens % page_size)
        is_seen[slots] = True
        k, v = (p.view(-1, KV_HEADS, HEAD_DIM)[slots].double() for p in (k_pool, v_pool))
        for head in range(HEADS):
            of = head // (HEADS // KV_HEADS)
            weights = torch.softmax(k[:, of] @ q[row, head].double() * 0.25, 0)
            expected[row, head] = weights @ v[:, of]
    for pool in (k_pool, v_pool):
        pool.view(-1, KV_HEADS, HEAD_DIM)[~is_seen] = float("nan")
    plan = plan_cpu_decode(
        table, np.array(lens, np.int32), page_size, dtype=q.dtype, window_left=window_left
    )
    return plan, run_cpu_decode(plan, q, k_pool, v_pool, 0.25), expected


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("is_scattered", [True, False])
@pytest.mark.parametrize("window_left", [-1, 0, 37, 300])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_requests_of_all_lengths_in_one_batch(
    page_size: int, window_left: int, is_scattered: bool
) -> None:
    lens = [300, 1, 290, 17, 1200, 2, 310, 600, 16, 33]
    _, actual, expected = run(lens, page_size, None, is_scattered, window_left)
    assert_close(actual, expected)


def test_requests_of_like_length_are_read_in_one_call() -> None:
    plan, actual, expected = run([300, 290, 310, 280])
    assert len(plan.groups) == 1
    assert_close(actual, expected)


def test_long_adjacent_requests_are_read_in_place() -> None:
    plan, actual, expected = run([300, 20, 400], is_scattered=False)
    assert sum(group.span is not None for group in plan.groups) == 2
    assert_close(actual, expected)


def test_a_long_request_does_not_make_short_ones_long() -> None:
    plan, actual, expected = run([1000, 10, 12, 11, 9])
    assert [group.end - group.start for group in plan.groups] == [1, 4]
    assert_close(actual, expected)


@pytest.mark.parametrize("is_scattered", [True, False])
def test_a_shared_prefix_is_read_once(is_scattered: bool) -> None:
    plan, actual, expected = run([150, 131, 129, 180], 4, [0, 32, 32, 32], is_scattered)
    assert [(p.start, p.end, p.span.num_keys) for p in plan.prefixes] == [(0, 4, 128)]
    assert_close(actual, expected)


def test_each_cluster_shares_its_own_prefix() -> None:
    lens = [900, 420, 410, 5, 430]
    table_of_first = [0, 100, 100, 0, 100]
    plan, actual, expected = run(lens, 4, table_of_first)
    assert len(plan.prefixes) == 1
    assert plan.prefixes[0].span.num_keys == 400
    assert_close(actual, expected)


def test_a_request_keeps_its_newest_key_to_itself() -> None:
    # All of request 1 but its last page is shared, and so is a page that it fills exactly.
    plan, actual, expected = run([400, 256, 300], 4, [0, 63, 64])
    assert plan.prefixes[0].span.num_keys == 252
    assert_close(actual, expected)


def test_a_short_shared_prefix_is_not_worth_a_call() -> None:
    plan, actual, expected = run([30, 31], 4, [0, 4])
    assert not plan.prefixes
    assert_close(actual, expected)


def test_a_window_hides_shared_prefixes() -> None:
    plan, actual, expected = run([400, 420, 410], 4, [0, 90, 90], window_left=50)
    assert not plan.prefixes
    assert_close(actual, expected)
