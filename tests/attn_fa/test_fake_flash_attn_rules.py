"""Every argument rule of FlashAttention is refused by the fakes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fakes.fake_flash_attn import FlashAttention2, FlashAttention3, FlashAttention4

Arguments = dict[str, Any]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def half(*size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.bfloat16)


def pages(page_size: int) -> Tensor:
    return half(4, page_size, 2, 64)


def decode_2(**changed: Any) -> Any:
    arguments: Arguments = {
        "q": half(2, 1, 4, 64),
        "k_cache": pages(256),
        "v_cache": pages(256),
        "cache_seqlens": ints(3, 9),
        "block_table": ints(0, 1, 2, 3).view(2, 2),
        "causal": True,
    }
    return FlashAttention2.flash_attn_with_kvcache(**arguments | changed)


def prefill_2(**changed: Any) -> Any:
    arguments: Arguments = {
        "q": half(4, 4, 64),
        "k": pages(256),
        "v": pages(256),
        "cu_seqlens_q": ints(0, 3, 4),
        "cu_seqlens_k": ints(0, 3, 12),
        "max_seqlen_q": 3,
        "max_seqlen_k": 9,
        "block_table": ints(0, 1, 2, 3).view(2, 2),
        "causal": True,
    }
    return FlashAttention2.flash_attn_varlen_func(**arguments | changed)


def ragged_3(**changed: Any) -> Any:
    arguments: Arguments = {
        "q": half(4, 4, 64),
        "k_cache": pages(16),
        "v_cache": pages(16),
        "cache_seqlens": ints(3, 9),
        "page_table": ints(0, 1, 2, 3).view(2, 2),
        "cu_seqlens_q": ints(0, 3, 4),
        "max_seqlen_q": 3,
        "causal": True,
    }
    return FlashAttention3.flash_attn_with_kvcache(**arguments | changed)


def ragged_4(**changed: Any) -> Any:
    arguments: Arguments = {
        "q": half(4, 4, 64),
        "k": pages(16),
        "v": pages(16),
        "seqused_k": ints(3, 9),
        "page_table": ints(0, 1, 2, 3).view(2, 2),
        "cu_seqlens_q": ints(0, 3, 4),
        "max_seqlen_q": 3,
        "causal": True,
    }
    return FlashAttention4.flash_attn_varlen_func(**arguments | changed)


@pytest.mark.parametrize("call", [decode_2, prefill_2, ragged_3])
def test_a_right_call_is_served(call: Callable[..., Tensor]) -> None:
    assert call().isfinite().all()


def test_generation_4_returns_a_pair() -> None:
    out, lse = ragged_4()
    assert out.shape == (4, 4, 64)
    assert lse is None
    assert ragged_4(return_lse=True)[1].shape == (4, 4)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"k_cache": pages(16), "v_cache": pages(16)}, "divisible by 256"),
        ({"cache_batch_idx": ints(0, 1)}, "excludes cache_batch_idx"),
        ({"cache_leftpad": ints(0, 1)}, "excludes cache_batch_idx"),
        ({"rotary_cos": half(9, 32)}, "rotary needs k"),
        ({"q": half(2, 4, 64)}, "reqs, n, heads"),
        ({"q": half(2, 1, 4, 64).float()}, "fp16 or bf16"),
        ({"q": half(2, 1, 3, 64)}, "multiple of KV heads"),
        ({"block_table": torch.zeros(2, 2).long()}, "must be int32"),
        ({"block_table": ints(0, 1, 2, 9).view(2, 2), "cache_seqlens": ints(3, 300)}, "pool"),
        ({"cache_seqlens": torch.tensor([3, 9])}, "must be int32"),
        ({"cache_seqlens": ints(3, 600)}, "longer than the table"),
    ],
)
def test_generation_2_refuses_in_decode(changed: Arguments, message: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=message):
        decode_2(**changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"k": pages(128), "v": pages(128)}, "divisible by 256"),
        ({"q": half(2, 2, 4, 64)}, "tokens, heads"),
        ({"max_seqlen_q": 2}, "max_seqlen_q is too small"),
        ({"max_seqlen_k": 8}, "max_seqlen_k is too small"),
        ({"cu_seqlens_k": torch.tensor([0, 3, 12])}, "must be int32"),
        ({"q": half(4, 4, 60)}, "head dimension"),
    ],
)
def test_generation_2_refuses_in_prefill(changed: Arguments, message: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=message):
        prefill_2(**changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_seqlen_q": None}, "needs max_seqlen_q"),
        ({"max_seqlen_q": 2}, "too small"),
        ({"num_splits": 257}, "num_splits"),
        ({"cu_seqlens_q": None}, "reqs, n, heads"),
        ({"q": half(2, 2, 4, 64)}, "tokens, heads"),
        ({"page_table": ints(0, 1, 2, 3).view(2, 2).t()}, "rows must be contiguous"),
        ({"v_cache": pages(16).half()}, "one dtype"),
    ],
)
def test_generation_3_refuses(changed: Arguments, message: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=message):
        ragged_3(**changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cu_seqlens_k": ints(0, 3, 12)}, "not supported with cu_seqlens_k"),
        ({"page_table": torch.zeros(2, 2).long()}, "page_table must be int32"),
        ({"page_table": ints(0, 1, 2, 3).view(2, 2).t()}, "contiguous in the last dimension"),
        ({"num_splits": 0}, "SplitKV not supported"),
        ({"window_size": (-1, -1)}, "None, not -1"),
        ({"max_seqlen_k": 8}, "max_seqlen_k is too small"),
        ({"seqused_k": ints(3, 9, 1)}, "one length per request"),
        ({"cu_seqlens_q": None}, "reqs, n, heads"),
    ],
)
def test_generation_4_refuses(changed: Arguments, message: str) -> None:
    with pytest.raises((AssertionError, RuntimeError, ValueError), match=message):
        ragged_4(**changed)


def test_without_lengths_every_page_counts() -> None:
    ones = torch.ones_like(pages(16))
    garbage = ones.clone()
    garbage[1, 9:] = 3
    assert ragged_4(v=garbage)[0].max() == 1
    assert ragged_4(v=garbage, seqused_k=None)[0].max() > 1
