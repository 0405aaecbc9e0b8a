"""Attention over a paged KV pool in plain PyTorch, for a CPU and for CUDA.

What depends on the step alone (which slots a request reads, which of them are masked) is worked
out once by ``plan_decode`` / ``plan_prefill``; ``run_decode`` / ``run_prefill`` are called once
per layer. ``paged_decode`` / ``paged_prefill`` do both, for tests and as a reference.

Pools are ``[num_pages, page_size, num_kv_heads, head_dim]``; the slot of a token is
``page * page_size + offset``. ``window_left = w`` lets a token see itself and the ``w`` tokens
before it; -1 is no limit. Keys and values of the step's tokens are in the pool already.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

IntArray = npt.NDArray[np.integer]

# Rows of a prefill mask that are made at a time, so that a long prompt does not need a mask of
# prompt length squared.
MAX_MASK_ROWS = 1024


@dataclass(slots=True)
class Scratch:
    """Room for gathered keys and values, shared by the layers of a step.

    Fresh memory for each layer would cost more in page faults than the copy.
    """

    _buffers: dict[str, Tensor] = field(default_factory=dict)

    def gather(self, name: Literal["k", "v"], pool: Tensor, index: Tensor) -> Tensor:
        """Return ``pool[index]``, valid until the next call with this name."""
        size = len(index) * pool[0].numel()
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = pool.new_empty(size)
        out = buffer[:size].view(len(index), *pool.shape[1:])
        return torch.index_select(pool, 0, index, out=out)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """What every layer of one decode step shares.

    Attributes:
        slots: ``[num_reqs * max_keys]`` int64 on the device; short rows repeat their last slot.
        bias: ``[num_reqs, 1, 1, max_keys]`` in the dtype of the queries, 0 or -inf; None when
            all rows are full.
        scratch: Where gathered keys and values go.
    """

    slots: Tensor
    bias: Tensor | None
    scratch: Scratch = field(default_factory=Scratch)


@dataclass(frozen=True, slots=True)
class PrefillBlock:
    """A run of query rows of one request.

    Attributes:
        start: First row in ``q``.
        end: One past the last row.
        pages: ``[num_pages]`` int64 on the device, those that its rows may see.
        keys: The part of their tokens.
        bias: ``[rows, num_keys]`` 0 or -inf; None when ``is_causal`` says it all.
        is_causal: Query row i sees keys 0 to i.
    """

    start: int
    end: int
    pages: Tensor
    keys: slice
    bias: Tensor | None
    is_causal: bool

    def read(self, name: Literal["k", "v"], pool: Tensor, scratch: Scratch) -> Tensor:
        """Return ``[1, num_kv_heads, num_keys, head_dim]`` of a pool."""
        tokens = scratch.gather(name, pool, self.pages).flatten(0, 1)[self.keys]
        return tokens.transpose(0, 1).unsqueeze(0)


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """What every layer of one prefill step shares.

    Attributes:
        blocks: In the order of their rows.
        scratch: Where gathered keys and values go.
    """

    blocks: tuple[PrefillBlock, ...]
    scratch: Scratch = field(default_factory=Scratch)


def plan_decode(
    page_table: IntArray,
    seq_lens: IntArray,
    page_size: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    window_left: int = -1,
) -> DecodePlan:
    """Plan a decode step from the host's page table.

    Args:
        page_table: ``[num_reqs, max_pages]`` int32 on the host; what is past a request's pages
            is not read.
        seq_lens: ``[num_reqs]`` on the host, tokens per request with the new one, at least 1.
        page_size: Tokens per page.
        dtype: Of the queries.
        device: Of the pool.
        window_left: See the module.

    Returns:
        The plan. It costs two copies to the device and no synchronisation.
    """
    starts = np.maximum(seq_lens - 1 - window_left, 0) if window_left >= 0 else 0 * seq_lens
    num_keys = seq_lens - starts
    longest = int(num_keys.max())
    offsets = np.arange(longest)
    # Clamped, so that masked keys are real ones: 0 * nan would reach the output.
    tokens = np.minimum(starts[:, None] + offsets, seq_lens[:, None] - 1).astype(np.int64)
    pages = np.take_along_axis(page_table, tokens // page_size, axis=1).astype(np.int64)
    slots = torch.from_numpy((pages * page_size + tokens % page_size).reshape(-1))
    bias = None
    if int(num_keys.min()) < longest:
        hidden = torch.from_numpy(offsets >= num_keys[:, None])
        bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        bias = bias[:, None, None].to(device, non_blocking=True)
    return DecodePlan(slots.to(device, non_blocking=True), bias)


def plan_decode_on_device(
    page_table: Tensor,
    seq_lens: Tensor,
    page_size: int,
    *,
    dtype: torch.dtype,
    window_left: int = -1,
) -> DecodePlan:
    """Plan a decode step from tensors alone, in fixed shapes: it can be captured in a graph.

    Args:
        page_table: ``[num_reqs, max_pages]`` int32 on the device; entries past a request's pages
            are ignored.
        seq_lens: ``[num_reqs]`` int32 on the device; rows that pad the batch have length 1 and
            a page that exists.
        page_size: Tokens per page.
        dtype: Of the queries.
        window_left: See the module.

    Returns:
        A plan of ``max_pages * page_size`` keys per request.
    """
    lens = seq_lens.to(torch.int64).unsqueeze(1)
    offsets = torch.arange(page_table.shape[1] * page_size, device=page_table.device)
    # Clamped, so that masked keys are real ones: 0 * nan would reach the output.
    tokens = torch.minimum(offsets.unsqueeze(0), lens - 1).clamp_(min=0)
    pages = page_table.gather(1, tokens // page_size).to(torch.int64)
    slots = pages * page_size + tokens % page_size
    hidden = offsets >= lens
    if window_left >= 0:
        hidden = hidden | (offsets < lens - 1 - window_left)
    bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    bias.masked_fill_(hidden, float("-inf"))
    return DecodePlan(slots.flatten(), bias[:, None, None])


def run_decode(
    plan: DecodePlan, q: Tensor, k_pool: Tensor, v_pool: Tensor, sm_scale: float
) -> Tensor:
    """Attend with one query per request.

    Args:
        plan: From ``plan_decode`` or ``plan_decode_on_device``.
        q: ``[num_reqs, num_heads, head_dim]``.
        k_pool: ``[num_pages, page_size, num_kv_heads, head_dim]``.
        v_pool: Like ``k_pool``.
        sm_scale: Factor on the scores.

    Returns:
        ``[num_reqs, num_heads, head_dim]``.
    """
    num_reqs, num_heads, head_dim = q.shape
    num_kv_heads = k_pool.shape[2]
    # The query heads of a group become query rows, so that each key is read once.
    rows = q.reshape(num_reqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    shape = (num_reqs, -1, num_kv_heads, head_dim)
    k = plan.scratch.gather("k", k_pool.flatten(0, 1), plan.slots).view(shape)
    v = plan.scratch.gather("v", v_pool.flatten(0, 1), plan.slots).view(shape)
    out = F.scaled_dot_product_attention(
        rows, k.transpose(1, 2), v.transpose(1, 2), attn_mask=plan.bias, scale=sm_scale
    )  # [num_reqs, num_kv_heads, group, head_dim]
    return out.reshape(q.shape)


def plan_prefill(
    page_table: IntArray,
    cu_seqlens_q: IntArray,
    seq_lens: IntArray,
    page_size: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    window_left: int = -1,
) -> PrefillPlan:
    """Plan a prefill step, in which the queries of a request are its last tokens.

    Args:
        page_table: ``[num_reqs, max_pages]`` int32 on the host.
        cu_seqlens_q: ``[num_reqs + 1]`` on the host, where each request's rows begin in ``q``.
        seq_lens: ``[num_reqs]`` on the host, tokens per request, cached and new.
        page_size: Tokens per page.
        dtype: Of the queries.
        device: Of the pool.
        window_left: See the module.

    Returns:
        The plan.
    """
    blocks: list[PrefillBlock] = []
    for row, seq_len in enumerate(int(n) for n in seq_lens):
        first, last = int(cu_seqlens_q[row]), int(cu_seqlens_q[row + 1])
        num_cached = seq_len - (last - first)
        whole = num_cached == 0 and (window_left < 0 or window_left >= seq_len - 1)
        step = max(last - first, 1) if whole else MAX_MASK_ROWS
        for start in range(first, last, step):
            end = min(start + step, last)
            key_end = num_cached + end - first
            key_start = 0 if window_left < 0 else max(num_cached + start - first - window_left, 0)
            first_page = key_start // page_size
            pages = page_table[row, first_page : (key_end - 1) // page_size + 1].astype(np.int64)
            pages_on_device = torch.from_numpy(pages).to(device, non_blocking=True)
            keys = slice(key_start - first_page * page_size, key_end - first_page * page_size)
            bias = None
            if not whole and (end - start > 1 or window_left >= 0):
                bias = _band_bias(end - start, key_end - key_start, window_left, dtype, device)
            blocks.append(PrefillBlock(start, end, pages_on_device, keys, bias, whole))
    return PrefillPlan(tuple(blocks))


def run_prefill(
    plan: PrefillPlan, q: Tensor, k_pool: Tensor, v_pool: Tensor, sm_scale: float
) -> Tensor:
    """Attend with the last tokens of each request.

    Args:
        plan: From ``plan_prefill``.
        q: ``[num_tokens, num_heads, head_dim]``.
        k_pool: ``[num_pages, page_size, num_kv_heads, head_dim]``.
        v_pool: Like ``k_pool``.
        sm_scale: Factor on the scores.

    Returns:
        ``[num_tokens, num_heads, head_dim]``.
    """
    has_groups = q.shape[1] != k_pool.shape[2]
    outs = []
    for block in plan.blocks:
        attended = F.scaled_dot_product_attention(
            q[block.start : block.end].transpose(0, 1).unsqueeze(0),
            block.read("k", k_pool, plan.scratch),
            block.read("v", v_pool, plan.scratch),
            attn_mask=block.bias,
            is_causal=block.is_causal,
            scale=sm_scale,
            enable_gqa=has_groups,
        )  # [1, num_heads, rows, head_dim]
        outs.append(attended[0].transpose(0, 1))
    return outs[0].contiguous() if len(outs) == 1 else torch.cat(outs)


def _band_bias(
    num_rows: int, num_keys: int, window_left: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return ``[num_rows, num_keys]``: 0 where the last rows may look, else -inf."""
    seen = torch.ones(num_rows, num_keys, dtype=torch.bool, device=device)
    seen = seen.tril_(num_keys - num_rows)
    if window_left >= 0:
        seen = seen.triu_(num_keys - num_rows - window_left)
    bias = torch.zeros(num_rows, num_keys, dtype=dtype, device=device)
    return bias.masked_fill_(~seen, float("-inf"))


def paged_decode(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: IntArray,
    seq_lens: IntArray,
    sm_scale: float,
    window_left: int = -1,
) -> Tensor:
    """Plan and run one decode; see ``plan_decode`` and ``run_decode`` for the arguments."""
    plan = plan_decode(
        page_table,
        seq_lens,
        k_pool.shape[1],
        dtype=q.dtype,
        device=q.device,
        window_left=window_left,
    )
    return run_decode(plan, q, k_pool, v_pool, sm_scale)


def paged_prefill(  # noqa: PLR0913 - the arguments of its plan and its run
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: IntArray,
    cu_seqlens_q: IntArray,
    seq_lens: IntArray,
    sm_scale: float,
    window_left: int = -1,
) -> Tensor:
    """Plan and run one prefill; see ``plan_prefill`` and ``run_prefill`` for the arguments."""
    plan = plan_prefill(
        page_table,
        cu_seqlens_q,
        seq_lens,
        k_pool.shape[1],
        dtype=q.dtype,
        device=q.device,
        window_left=window_left,
    )
    return run_prefill(plan, q, k_pool, v_pool, sm_scale)
