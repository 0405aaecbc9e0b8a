"""FlashAttention 2, 3 and 4: the paged calls, their signatures and refusals, in PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.fakes.fake_paged import Mask, attend, default_scale, read_pages, require, require_i32
from tests.fakes.fake_stream import STREAM

HALF_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Keys:
    """A paged cache as one call sees it.

    Attributes:
        k: ``[num_pages, page_size, num_kv_heads, head_dim]``.
        v: The same shape.
        table: ``[num_reqs, width]`` int32.
        lengths: ``[num_reqs]`` int32.
    """

    k: Tensor
    v: Tensor
    table: Tensor
    lengths: Tensor


def check_cache(q: Tensor, keys: Keys, head_dims: tuple[int, ...]) -> None:
    """Check what all generations check."""
    for name, tensor in (("q", q), ("k", keys.k), ("v", keys.v)):
        require(tensor.dtype in HALF_DTYPES, f"{name} must be fp16 or bf16", RuntimeError)
        require(tensor.dtype == q.dtype, "q, k and v must have one dtype", RuntimeError)
        require(tensor.device == q.device, f"{name} must be on {q.device}", RuntimeError)
        require(tensor.stride(-1) == 1, f"{name} must be contiguous at the end", RuntimeError)
    require(keys.k.dim() == 4, "a paged cache has four dimensions", RuntimeError)
    require(keys.k.shape[-1] == q.shape[-1], "q and k differ in head dimension", RuntimeError)
    require(q.shape[-1] in head_dims, f"head dimension {q.shape[-1]}", RuntimeError)
    require(
        q.shape[-2] % keys.k.shape[2] == 0, "heads must be a multiple of KV heads", RuntimeError
    )
    require_i32(keys.table, "the page table", q.device)
    require_i32(keys.lengths, "the lengths", q.device)
    require(keys.table.dim() == 2, "the page table is two-dimensional", RuntimeError)
    require(keys.table.stride(-1) == 1, "the page table's rows must be contiguous", RuntimeError)


def attend_ragged(
    q: Tensor, cu_seqlens_q: Tensor, keys: Keys, mask: Mask, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attend with ``q[num_tokens, heads, head_dim]``; returns out and ``[heads, num_tokens]``."""
    num_reqs = len(cu_seqlens_q) - 1
    require(tuple(keys.lengths.shape) == (num_reqs,), "one length per request", AssertionError)
    require(keys.table.shape[0] == num_reqs, "one row of the table per request", AssertionError)
    out = torch.full_like(q, float("nan"))
    lse = torch.empty(q.shape[:2], dtype=torch.float32)

    def kernel() -> None:
        bounds = cu_seqlens_q.tolist()
        page_size = keys.k.shape[1]
        for row, length in enumerate(keys.lengths.tolist()):
            pages = keys.table[row][: -(-length // page_size)]
            require(length <= keys.table.shape[1] * page_size, "longer than the table is wide")
            k, v = (read_pages(cache, pages, length) for cache in (keys.k, keys.v))
            part = slice(bounds[row], bounds[row + 1])
            result, row_lse = attend(q[part], k, v, mask, sinks)
            out[part] = result.to(out.dtype)
            lse[part] = row_lse

    STREAM.submit(kernel)
    return out, lse.transpose(0, 1)


def attend_rectangle(q: Tensor, keys: Keys, mask: Mask) -> tuple[Tensor, Tensor]:
    """Attend with ``q[num_reqs, n, heads, head_dim]``."""
    num_reqs, n = q.shape[:2]
    cu_seqlens_q = torch.arange(0, (num_reqs + 1) * n, n, dtype=torch.int32)
    out, lse = attend_ragged(q.flatten(0, 1), cu_seqlens_q, keys, mask)
    return out.view(q.shape), lse.unflatten(1, (num_reqs, n)).transpose(0, 1)


def make_mask(
    scale: float | None, head_dim: int, causal: bool, window: tuple[int, int], softcap: float
) -> Mask:
    """Return the mask of a call; -1 is unlimited."""
    require(window[1] in (-1, 0) or not causal, "a causal window has no right side")
    return Mask(default_scale(scale, head_dim), causal, window[0], softcap)


FA_HEAD_DIMS = tuple(range(8, 257, 8))


class FlashAttention2:
    """The functions of ``flash_attn.flash_attn_interface`` 2.8."""

    @staticmethod
    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Tensor | None = None,
    ) -> Tensor:
        del dropout_p, alibi_slopes, deterministic, return_attn_probs
        require(block_table is not None, "the fake is paged", NotImplementedError)
        assert block_table is not None
        require(q.dim() == 3, "q is [tokens, heads, head_dim]", RuntimeError)
        require_i32(cu_seqlens_q, "cu_seqlens_q", q.device)
        require_i32(cu_seqlens_k, "cu_seqlens_k", q.device)
        lengths = cu_seqlens_k.diff()
        keys = Keys(k, v, block_table, lengths)
        check_cache(q, keys, FA_HEAD_DIMS)
        require(k.shape[1] % 256 == 0, "paged KV cache block size must be divisible by 256")
        require(int(cu_seqlens_q.diff().max()) <= max_seqlen_q, "max_seqlen_q is too small")
        require(int(lengths.max()) <= max_seqlen_k, "max_seqlen_k is too small")
        mask = make_mask(softmax_scale, q.shape[-1], causal, window_size, softcap)
        return attend_ragged(q, cu_seqlens_q, keys, mask)[0]

    @staticmethod
    def flash_attn_with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        cache_seqlens: Tensor | None = None,
        cache_batch_idx: Tensor | None = None,
        cache_leftpad: Tensor | None = None,
        block_table: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        alibi_slopes: Tensor | None = None,
        num_splits: int = 0,
        return_softmax_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        del rotary_sin, rotary_interleaved, alibi_slopes
        require(rotary_cos is None or k is not None, "rotary needs k and v", RuntimeError)
        is_plain = k is None and v is None and block_table is not None
        is_paged_alone = cache_batch_idx is None and cache_leftpad is None
        require(is_paged_alone, "a block table excludes cache_batch_idx and leftpad", RuntimeError)
        require(is_plain, "the fake is paged and appends nothing", NotImplementedError)
        assert block_table is not None
        assert cache_seqlens is not None
        require(q.dim() == 4, "q is [reqs, n, heads, head_dim]", RuntimeError)
        require(0 <= num_splits <= 128, "num_splits", RuntimeError)
        keys = Keys(k_cache, v_cache, block_table, cache_seqlens)
        check_cache(q, keys, FA_HEAD_DIMS)
        require(k_cache.shape[1] % 256 == 0, "paged KV cache block size must be divisible by 256")
        mask = make_mask(softmax_scale, q.shape[-1], causal, window_size, softcap)
        out, lse = attend_rectangle(q, keys, mask)
        return (out, lse) if return_softmax_lse else out


class FlashAttention3:
    """The function of ``flash_attn_interface``."""

    @staticmethod
    def flash_attn_with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        qv: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        cache_seqlens: Tensor | None = None,
        cache_batch_idx: Tensor | None = None,
        cache_leftpad: Tensor | None = None,
        page_table: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k_new: Tensor | None = None,
        max_seqlen_q: int | None = None,
        rotary_seqlens: Tensor | None = None,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        scheduler_metadata: Tensor | None = None,
        num_splits: int = 0,
        pack_gqa: bool | None = None,
        sm_margin: int = 0,
        return_softmax_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        del rotary_cos, rotary_sin, rotary_seqlens, rotary_interleaved, scheduler_metadata
        del cache_batch_idx, cache_leftpad, attention_chunk, pack_gqa, sm_margin
        del q_descale, k_descale, v_descale
        is_plain = k is None and v is None and qv is None and cu_seqlens_k_new is None
        is_fitting = is_plain and page_table is not None and cache_seqlens is not None
        require(is_fitting, "the fake is paged and appends nothing", NotImplementedError)
        assert page_table is not None
        assert cache_seqlens is not None
        has_max = cu_seqlens_q is None or max_seqlen_q is not None
        require(has_max, "cu_seqlens_q needs max_seqlen_q", RuntimeError)
        require(0 <= num_splits <= 256, "num_splits", RuntimeError)
        keys = Keys(k_cache, v_cache, page_table, cache_seqlens)
        check_cache(q, keys, FA_HEAD_DIMS)
        mask = make_mask(softmax_scale, q.shape[-1], causal, window_size, softcap)
        if cu_seqlens_q is None:
            require(q.dim() == 4, "without cu_seqlens_q, q is [reqs, n, heads, d]", RuntimeError)
            out, lse = attend_rectangle(q, keys, mask)
        else:
            require(q.dim() == 3, "with cu_seqlens_q, q is [tokens, heads, d]", RuntimeError)
            require_i32(cu_seqlens_q, "cu_seqlens_q", q.device)
            assert max_seqlen_q is not None
            is_bound = int(cu_seqlens_q.diff().max()) <= max_seqlen_q
            require(is_bound, "max_seqlen_q is too small", RuntimeError)
            out, lse = attend_ragged(q, cu_seqlens_q, keys, mask)
        return (out, lse) if return_softmax_lse else out


class FlashAttention4:
    """The function of ``flash_attn.cute`` 4.0 on compute capability 9.0."""

    @staticmethod
    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qv: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        min_seqlen_k: int | None = None,
        seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None,
        gather_kv_indices: Tensor | None = None,
        page_table: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int | None, int | None] = (None, None),
        learnable_sink: Tensor | None = None,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        return_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        del qv, min_seqlen_k, seqused_q, gather_kv_indices, pack_gqa, deterministic
        require(page_table is not None, "the fake is paged", NotImplementedError)
        assert page_table is not None
        no_cu = cu_seqlens_k is None
        require(no_cu, "page_table is not supported with cu_seqlens_k", AssertionError)
        require(num_splits == 1, "SplitKV not supported on SM 9.0", AssertionError)
        is_i32 = page_table.dtype == torch.int32
        require(is_i32, "page_table must be int32", AssertionError)
        is_contiguous = page_table.stride(-1) == 1
        require(
            is_contiguous, "page_table must be contiguous in the last dimension", AssertionError
        )
        require(-1 not in window_size, "None, not -1, is an unlimited window", AssertionError)
        width = page_table.shape[1] * k.shape[1]
        num_reqs = page_table.shape[0]
        lengths = torch.full((num_reqs,), width, dtype=torch.int32)
        keys = Keys(k, v, page_table, lengths if seqused_k is None else seqused_k)
        check_cache(q, keys, FA_HEAD_DIMS)
        is_bound = int(keys.lengths.max()) <= (width if max_seqlen_k is None else max_seqlen_k)
        require(is_bound, "max_seqlen_k is too small", AssertionError)
        left, right = (-1 if side is None else side for side in window_size)
        mask = make_mask(softmax_scale, q.shape[-1], causal, (left, right), softcap)
        if cu_seqlens_q is None:
            require(q.dim() == 4, "without cu_seqlens_q, q is [reqs, n, heads, d]", AssertionError)
            out, lse = attend_rectangle(q, keys, mask)
        else:
            require_i32(cu_seqlens_q, "cu_seqlens_q", q.device)
            out, lse = attend_ragged(q, cu_seqlens_q, keys, mask, learnable_sink)
        return out, (lse if return_lse else None)
