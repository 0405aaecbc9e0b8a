"""Decode attention on a CPU: few calls, each key read once.

A step is bound by reading the keys and by the number of calls. So

* the query heads of a group are query rows of one call;
* a long request whose pages follow each other is read in place;
* other requests are gathered in groups of like length, padded to the longest, one call each;
* a prefix that several requests share is read once, with the queries of all of them, and what
  they see of it is merged with what they see of their own keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.attention.key_span import IntArray, KeySpan, Scratch, find_keys

# Adjacent keys are read in place from so many on; below, what a call costs is more than a copy.
MIN_KEYS_IN_PLACE = 256
# Most keys of a group, so that gathered keys stay in a cache; and so many are one group however
# unlike their lengths are.
MAX_GROUP_KEYS = 4096
MAX_SMALL_KEYS = 512
# A request joins a group if it has at least this part of the keys of the longest.
MIN_LIKENESS = 0.7
# A prefix is read once for all from so many keys on, summed over the requests that share it but
# one: they are what is saved, and two calls and a merge are what it costs.
MIN_SHARED_KEYS = 256


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Requests whose keys are read together.

    Attributes:
        start: First row in plan order.
        end: One past the last row.
        span: The keys of a request that is alone; ``None`` for a gathered group.
        slots: ``[num_rows * num_keys]`` int64 to gather; rows with fewer keys repeat their last.
        bias: ``[num_rows, 1, 1, num_keys]``, 0 or -inf; ``None`` when all rows are full.
    """

    start: int
    end: int
    span: KeySpan | None
    slots: Tensor | None = None
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Keys that the rows ``start ..< end``, in plan order, all see."""

    start: int
    end: int
    span: KeySpan


class GatherViews(NamedTuple):
    """Where the keys and values of a group are gathered, and how attention sees them.

    Attributes:
        k_out: ``[num_rows * num_keys, num_kv_heads, head_dim]``.
        v_out: The same shape.
        k: The same memory, ``[num_rows, num_kv_heads, num_keys, head_dim]``.
        v: The same shape.
    """

    k_out: Tensor
    v_out: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True)
class CpuDecodePlan:
    """What every layer of one decode step shares.

    Attributes:
        groups: In plan order, which they cover.
        prefixes: Of some rows; their groups hold only the keys behind the prefix.
        order: ``[num_reqs]`` int64, the request of each row; ``None`` when it is the row number.
        inverse: The inverse permutation of ``order``.
        scratch: Where gathered keys and values go.
        views: Parts of the scratch by the first row of a group; made by the first layer.
    """

    groups: tuple[DecodeGroup, ...]
    prefixes: tuple[SharedPrefix, ...] = ()
    order: Tensor | None = None
    inverse: Tensor | None = None
    scratch: Scratch = field(default_factory=Scratch)
    views: dict[int, GatherViews] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Requests of a step: pages, and the tokens ``starts ..< ends`` that each sees."""

    page_table: IntArray
    starts: IntArray
    ends: IntArray
    page_size: int
    dtype: torch.dtype

    def span(self, row: int, start: int, end: int) -> KeySpan:
        device = torch.device("cpu")
        return find_keys(self.page_table[row], start, end, self.page_size, device)


def plan_cpu_decode(
    page_table: IntArray,
    seq_lens: IntArray,
    page_size: int,
    *,
    dtype: torch.dtype,
    window_left: int = -1,
) -> CpuDecodePlan:
    """Plan a decode step; see `minisgl.attention.paged_torch.plan_decode`."""
    starts = np.maximum(seq_lens - 1 - window_left, 0) if window_left >= 0 else 0 * seq_lens
    rows = _Rows(page_table, starts, seq_lens, page_size, dtype)
    num_reqs = len(seq_lens)
    if num_reqs == 1:
        return CpuDecodePlan((DecodeGroup(0, 1, rows.span(0, int(starts[0]), int(seq_lens[0]))),))
    clusters, shared = _shared_lens(rows)
    rows = _Rows(page_table, np.maximum(starts, shared), seq_lens, page_size, dtype)
    num_keys = rows.ends - rows.starts
    if not shared.any() and num_reqs * int(num_keys.max()) <= MAX_SMALL_KEYS:
        return CpuDecodePlan((_gathered(rows, np.arange(num_reqs), 0),))
    order = np.lexsort((-num_keys, clusters))
    groups = _group(rows, order)
    prefixes = _prefixes(rows, order, clusters, shared)
    if (order[:-1] < order[1:]).all():
        return CpuDecodePlan(groups, prefixes)
    inverse = torch.from_numpy(np.argsort(order))
    return CpuDecodePlan(groups, prefixes, torch.from_numpy(order), inverse)


def run_cpu_decode(
    plan: CpuDecodePlan, q: Tensor, k_pool: Tensor, v_pool: Tensor, sm_scale: float
) -> Tensor:
    """Attend with one query per request; see `minisgl.attention.paged_torch.run_decode`."""
    num_reqs, num_heads, head_dim = q.shape
    num_kv_heads = k_pool.shape[2]
    rows = q.reshape(num_reqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    span = plan.groups[0].span
    if num_reqs == 1 and span is not None:
        # The shortest way: at batch 1 a step is made of calls.
        k = span.read("k", k_pool, plan.scratch)
        v = span.read("v", v_pool, plan.scratch)
        return F.scaled_dot_product_attention(rows, k, v, scale=sm_scale).view(q.shape)
    if plan.order is not None:
        rows = rows.index_select(0, plan.order)
    if plan.prefixes:
        out = _attend_merged(plan, rows, k_pool, v_pool, sm_scale)
    else:
        outs = []
        for group in plan.groups:
            k, v = _read(plan, group, k_pool, v_pool)
            part = rows if len(plan.groups) == 1 else rows[group.start : group.end]
            attended = F.scaled_dot_product_attention(
                part, k, v, attn_mask=group.bias, scale=sm_scale
            )
            outs.append(attended)
        out = _joined(outs)
    if plan.inverse is not None:
        out = out.index_select(0, plan.inverse)
    return out.reshape(q.shape)


def _attend_merged(
    plan: CpuDecodePlan, rows: Tensor, k_pool: Tensor, v_pool: Tensor, sm_scale: float
) -> Tensor:
    """Return ``[num_reqs, num_kv_heads, group, head_dim]``, where prefixes are shared.

    Source: attention over parts of the keys, merged by the logarithms of their sums of
    exponentials, as in FlashDecoding and in Hydragen (arXiv:2402.05099).
    """
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    outs, sums = [], []
    for group in plan.groups:
        k, v = _read(plan, group, k_pool, v_pool)
        part = rows[group.start : group.end]
        attended, log_sum = attend(part, k, v, attn_mask=group.bias, scale=sm_scale)
        outs.append(attended)
        sums.append(log_sum)
    out, log_sums = _joined(outs), _joined(sums)
    num_reqs, num_kv_heads, group_size, head_dim = rows.shape
    for prefix in plan.prefixes:
        here = slice(prefix.start, prefix.end)
        k = prefix.span.read("k", k_pool, plan.scratch)
        v = prefix.span.read("v", v_pool, plan.scratch)
        queries = rows[here].transpose(0, 1).reshape(1, num_kv_heads, -1, head_dim)
        attended, log_sum = attend(queries, k, v, scale=sm_scale)
        attended = attended.view(num_kv_heads, -1, group_size, head_dim).transpose(0, 1)
        log_sum = log_sum.view(num_kv_heads, -1, group_size).transpose(0, 1)
        weight = (log_sum - log_sums[here]).sigmoid_().unsqueeze(-1).to(out.dtype)
        merged = torch.lerp(out[here], attended, weight)
        if prefix.end - prefix.start == num_reqs:
            return merged
        out[here] = merged
    return out


def _joined(parts: list[Tensor]) -> Tensor:
    """Return the parts as one tensor."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _read(
    plan: CpuDecodePlan, group: DecodeGroup, k_pool: Tensor, v_pool: Tensor
) -> tuple[Tensor, Tensor]:
    """Return keys and values of a group, ``[num_rows, num_kv_heads, num_keys, head_dim]``."""
    if group.span is not None:
        k = group.span.read("k", k_pool, plan.scratch)
        return k, group.span.read("v", v_pool, plan.scratch)
    assert group.slots is not None, "a group has either a span or slots"
    k_pool, v_pool = k_pool.flatten(0, 1), v_pool.flatten(0, 1)
    views = plan.views.get(group.start)
    if views is None:
        views = plan.views[group.start] = _make_views(plan.scratch, group, k_pool, v_pool)
    torch.index_select(k_pool, 0, group.slots, out=views.k_out)
    torch.index_select(v_pool, 0, group.slots, out=views.v_out)
    return views.k, views.v


def _make_views(
    scratch: Scratch, group: DecodeGroup, k_pool: Tensor, v_pool: Tensor
) -> GatherViews:
    """Take room for a group, whose slots are those of ``[num_slots, num_kv_heads, head_dim]``."""
    assert group.slots is not None, "only gathered groups need room"
    num_rows, num_slots = group.end - group.start, len(group.slots)
    k_out, v_out = scratch.room("k", k_pool, num_slots), scratch.room("v", v_pool, num_slots)
    shape = (num_rows, num_slots // num_rows, *k_pool.shape[1:])
    return GatherViews(
        k_out, v_out, k_out.view(shape).transpose(1, 2), v_out.view(shape).transpose(1, 2)
    )


def _group(rows: _Rows, order: IntArray) -> tuple[DecodeGroup, ...]:
    """Cut the rows into groups, in the order given."""
    num_keys = (rows.ends - rows.starts)[order]
    is_alone = (num_keys >= MIN_KEYS_IN_PLACE) & _are_adjacent(rows)[order]
    groups: list[DecodeGroup] = []
    start = 0
    while start < len(order):
        end, longest = start + 1, int(num_keys[start])
        if is_alone[start] or longest > MAX_GROUP_KEYS:
            row = int(order[start])
            span = rows.span(row, int(rows.starts[row]), int(rows.ends[row]))
            groups.append(DecodeGroup(start, end, span))
        else:
            while end < len(order) and not is_alone[end]:
                most = max(longest, int(num_keys[end]))
                least = min(int(num_keys[end]), int(num_keys[start:end].min()))
                total = most * (end + 1 - start)
                is_alike = least >= MIN_LIKENESS * most or total <= MAX_SMALL_KEYS
                if total > MAX_GROUP_KEYS or not is_alike:
                    break
                longest, end = most, end + 1
            groups.append(_gathered(rows, order[start:end], start))
        start = end
    return tuple(groups)


def _gathered(rows: _Rows, chosen: IntArray, start: int) -> DecodeGroup:
    """Make the group of the requests ``chosen``, whose first row is ``start``."""
    starts, ends = rows.starts[chosen], rows.ends[chosen]
    num_keys = ends - starts
    longest, page_size = int(num_keys.max()), rows.page_size
    offsets = np.arange(longest)
    # Clamped, so that masked keys are real ones: 0 * nan would reach the output.
    tokens = np.minimum(starts[:, None] + offsets, ends[:, None] - 1).astype(np.int64)
    pages = rows.page_table[chosen[:, None], tokens // page_size].astype(np.int64)
    slots = torch.from_numpy((pages * page_size + tokens % page_size).reshape(-1))
    bias = None
    if int(num_keys.min()) < longest:
        hidden = torch.from_numpy(offsets >= num_keys[:, None])
        bias = torch.zeros(hidden.shape, dtype=rows.dtype).masked_fill_(hidden, float("-inf"))
        bias = bias[:, None, None]
    return DecodeGroup(start, start + len(chosen), None, slots, bias)


def _are_adjacent(rows: _Rows) -> np.ndarray:
    """Return ``[num_reqs]``: whether the pages of each request follow each other."""
    first, last = rows.starts // rows.page_size, (rows.ends - 1) // rows.page_size
    columns = np.arange(1, rows.page_table.shape[1])
    is_inner = (columns > first[:, None]) & (columns <= last[:, None])
    is_next = rows.page_table[:, 1:] == rows.page_table[:, :-1] + 1
    return np.asarray((is_next | ~is_inner).all(axis=1))


def _shared_lens(rows: _Rows) -> tuple[np.ndarray, np.ndarray]:
    """Find the requests that share enough of a prefix.

    Returns:
        ``[num_reqs]`` number of the cluster that each request belongs to, -1 for none, and
        ``[num_reqs]`` tokens of the prefix that its cluster shares, 0 for none.
    """
    table, page_size = rows.page_table, rows.page_size
    num_reqs = len(rows.ends)
    shared = np.zeros(num_reqs, dtype=np.int64)
    clusters = np.unique(table[:, 0], return_inverse=True)[1].reshape(-1)
    if int(clusters.max()) == num_reqs - 1 or rows.starts.any():
        return np.full(num_reqs, -1, dtype=np.int64), shared
    for cluster in np.flatnonzero(np.bincount(clusters) > 1):
        members = np.flatnonzero(clusters == cluster)
        # Each keeps at least one key of its own, the new token's.
        num_pages = int((rows.ends[members].min() - 1) // page_size)
        own = table[members, :num_pages]
        is_same = (own == own[0]).all(axis=0)
        num_same = num_pages if is_same.all() else int(is_same.argmin())
        if num_same * page_size * (len(members) - 1) >= MIN_SHARED_KEYS:
            shared[members] = num_same * page_size
    return np.where(shared > 0, clusters, -1), shared


def _prefixes(
    rows: _Rows, order: IntArray, clusters: np.ndarray, shared: np.ndarray
) -> tuple[SharedPrefix, ...]:
    """Make the shared prefixes; ``order`` keeps the requests of a cluster together."""
    found = []
    in_order = clusters[order]
    for cluster in np.unique(in_order[in_order >= 0]):
        here = np.flatnonzero(in_order == cluster)
        row = int(order[here[0]])
        span = rows.span(row, 0, int(shared[row]))
        found.append(SharedPrefix(int(here[0]), int(here[-1]) + 1, span))
    return tuple(found)
