"""The paged attention in torch against a plain float64 reference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from minisgl.attention.paged_torch import (
    paged_decode,
    paged_prefill,
    plan_decode_on_device,
    run_decode,
)

HEAD_DIM = 16
# float32 sums of at most 400 products of order one.
TOLERANCE = 2e-5


@dataclass(frozen=True, slots=True)
class Case:
    """Requests in a pool: what the functions take, and the same keys in a row per request."""

    q: Tensor
    k_pool: Tensor
    v_pool: Tensor
    page_table: npt.NDArray[np.int32]
    cu_seqlens_q: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    keys: list[Tensor]
    values: list[Tensor]


def make_case(
    seq_lens: list[int],
    q_lens: list[int],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    page_size: int = 4,
    is_scattered: bool = True,
) -> Case:
    gen = torch.Generator().manual_seed(sum(seq_lens) + num_heads)
    rng = np.random.default_rng(0)
    pages_of = [-(-n // page_size) for n in seq_lens]
    num_pages = sum(pages_of) + 3
    order = rng.permutation(num_pages) if is_scattered else np.arange(num_pages)
    # Slots that no request owns hold nan: reading one shows in the output.
    k_pool = torch.full((num_pages, page_size, num_kv_heads, HEAD_DIM), float("nan"))
    v_pool = k_pool.clone()
    page_table = np.full((len(seq_lens), max(pages_of) + 1), -1, dtype=np.int32)
    keys, values, used = [], [], 0
    for row, (seq_len, num_own) in enumerate(zip(seq_lens, pages_of, strict=True)):
        pages = order[used : used + num_own]
        used += num_own
        page_table[row, :num_own] = pages
        tokens = np.arange(seq_len)
        slots = torch.from_numpy(pages[tokens // page_size] * page_size + tokens % page_size)
        k, v = (torch.randn(seq_len, num_kv_heads, HEAD_DIM, generator=gen) for _ in "kv")
        k_pool.view(-1, num_kv_heads, HEAD_DIM)[slots] = k
        v_pool.view(-1, num_kv_heads, HEAD_DIM)[slots] = v
        keys.append(k)
        values.append(v)
    q = torch.randn(sum(q_lens), num_heads, HEAD_DIM, generator=gen)
    cu_seqlens_q = np.cumsum([0, *q_lens]).astype(np.int32)
    lens = np.array(seq_lens, dtype=np.int32)
    return Case(q, k_pool, v_pool, page_table, cu_seqlens_q, lens, keys, values)


def naive_attention(case: Case, sm_scale: float, window_left: int = -1) -> Tensor:
    """One query, one head at a time, in float64."""
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    group = case.q.shape[1] // case.k_pool.shape[2]
    for row, (k, v) in enumerate(zip(case.keys, case.values, strict=True)):
        first, last = int(case.cu_seqlens_q[row]), int(case.cu_seqlens_q[row + 1])
        for index in range(first, last):
            position = len(k) - (last - index)
            low = 0 if window_left < 0 else max(0, position - window_left)
            for head in range(case.q.shape[1]):
                seen_k = k[low : position + 1, head // group].double()
                scores = seen_k @ case.q[index, head].double() * sm_scale
                seen_v = v[low : position + 1, head // group].double()
                out[index, head] = torch.softmax(scores, 0) @ seen_v
    return out


def decode(case: Case, window_left: int = -1) -> Tensor:
    return paged_decode(
        case.q, case.k_pool, case.v_pool, case.page_table, case.seq_lens, 0.25, window_left
    )


def prefill(case: Case, window_left: int = -1) -> Tensor:
    return paged_prefill(
        case.q,
        case.k_pool,
        case.v_pool,
        case.page_table,
        case.cu_seqlens_q,
        case.seq_lens,
        0.25,
        window_left,
    )


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8])
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_decode_is_right_for_every_head_ratio(group: int, num_kv_heads: int) -> None:
    case = make_case(
        [9, 1, 30], [1, 1, 1], num_heads=group * num_kv_heads, num_kv_heads=num_kv_heads
    )
    assert_close(decode(case), naive_attention(case, 0.25))


@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8])
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_prefill_is_right_for_every_head_ratio(group: int, num_kv_heads: int) -> None:
    case = make_case(
        [9, 1, 30], [9, 1, 13], num_heads=group * num_kv_heads, num_kv_heads=num_kv_heads
    )
    assert_close(prefill(case), naive_attention(case, 0.25))


@pytest.mark.parametrize("is_scattered", [True, False])
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_decode_reads_pages_of_every_size(page_size: int, is_scattered: bool) -> None:
    case = make_case([70, 1, 64, 5], [1] * 4, page_size=page_size, is_scattered=is_scattered)
    assert_close(decode(case), naive_attention(case, 0.25))


@pytest.mark.parametrize("is_scattered", [True, False])
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_prefill_reads_pages_of_every_size(page_size: int, is_scattered: bool) -> None:
    q_lens = [6, 1, 64, 2]
    case = make_case([70, 1, 64, 5], q_lens, page_size=page_size, is_scattered=is_scattered)
    assert_close(prefill(case), naive_attention(case, 0.25))


@pytest.mark.parametrize("seq_len", [1, 2, 17, 400])
@pytest.mark.parametrize("is_scattered", [True, False])
def test_decode_of_one_request(seq_len: int, is_scattered: bool) -> None:
    case = make_case([seq_len], [1], is_scattered=is_scattered)
    assert_close(decode(case), naive_attention(case, 0.25))


@pytest.mark.parametrize("window_left", [0, 1, 7, 29, 500])
def test_decode_sees_only_its_window(window_left: int) -> None:
    for seq_lens in ([30], [3, 30, 8]):
        case = make_case(seq_lens, [1] * len(seq_lens))
        assert_close(decode(case, window_left), naive_attention(case, 0.25, window_left))


@pytest.mark.parametrize("window_left", [0, 1, 7, 29, 500])
def test_prefill_sees_only_its_window(window_left: int) -> None:
    case = make_case([30, 12, 5], [30, 5, 1])
    assert_close(prefill(case, window_left), naive_attention(case, 0.25, window_left))


@pytest.mark.parametrize("window_left", [-1, 10])
def test_prefill_of_more_rows_than_one_mask_holds(
    window_left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl.attention.paged_torch.MAX_MASK_ROWS", 8)
    case = make_case([50, 21], [43, 21])
    assert_close(prefill(case, window_left), naive_attention(case, 0.25, window_left))


def test_prefill_in_chunks_equals_prefill_at_once() -> None:
    whole = make_case([40], [40])
    expected = prefill(whole)
    for first in range(0, 40, 8):
        part = Case(
            whole.q[first : first + 8],
            whole.k_pool,
            whole.v_pool,
            whole.page_table,
            np.array([0, 8], dtype=np.int32),
            np.array([first + 8], dtype=np.int32),
            whole.keys,
            whole.values,
        )
        assert_close(prefill(part), expected[first : first + 8].double())


@pytest.mark.parametrize("window_left", [-1, 6])
def test_decode_planned_on_the_device_equals_decode_planned_on_the_host(window_left: int) -> None:
    case = make_case([9, 1, 30], [1, 1, 1])
    plan = plan_decode_on_device(
        torch.from_numpy(case.page_table),
        torch.from_numpy(case.seq_lens),
        case.k_pool.shape[1],
        dtype=torch.float32,
        window_left=window_left,
    )
    actual = run_decode(plan, case.q, case.k_pool, case.v_pool, 0.25)
    assert_close(actual, naive_attention(case, 0.25, window_left))


def test_decode_in_bfloat16_keeps_the_dtype() -> None:
    case = make_case([9, 30], [1, 1])
    half = Case(
        case.q.bfloat16(),
        case.k_pool.bfloat16(),
        case.v_pool.bfloat16(),
        case.page_table,
        case.cu_seqlens_q,
        case.seq_lens,
        case.keys,
        case.values,
    )
    actual = decode(half)
    assert actual.dtype == torch.bfloat16
    # bfloat16 has 8 bits of mantissa; inputs and output are rounded to it.
    torch.testing.assert_close(actual.double(), naive_attention(case, 0.25), atol=3e-2, rtol=3e-2)
