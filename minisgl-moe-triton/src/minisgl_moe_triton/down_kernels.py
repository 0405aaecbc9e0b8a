"""The second product, and the sum over a token's choices."""

from __future__ import annotations

import triton.language as tl

from minisgl_moe_triton.grouped_kernels import multiply, pick_tile
from minisgl_moe_triton.route_kernels import wait_for_previous
from minisgl_moe_triton.triton_jit import jit


@jit
def down_kernel(  # noqa: PLR0913  # a kernel takes its arguments one by one
    h: tl.pointer_type,
    h_half: tl.pointer_type,
    weight: tl.pointer_type,
    y: tl.pointer_type,
    slots: tl.pointer_type,
    block_expert: tl.pointer_type,
    block_rows: tl.pointer_type,
    num_blocks: tl.pointer_type,
    max_blocks: tl.tensor,
    hidden: tl.constexpr,
    inner: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    group_m: tl.constexpr,
    has_halves: tl.constexpr,
    precision: tl.constexpr,
    has_tma: tl.constexpr,
    has_overlap: tl.constexpr,
) -> None:
    """Compute ``y = down(h)``, rows in slot order.

    ``y`` is ``[num_tokens * top_k, hidden]`` and ``weight`` ``[num_experts, hidden, inner]``; with
    ``has_tma``, ``h`` and ``weight`` are descriptors of their rows in blocks of
    ``[block_m, block_k]`` and ``[block_n, block_k]``, and ``h_half`` is one of half the rows of
    ``h``; otherwise it is ``h``.
    """
    wait_for_previous(has_overlap)
    block, tile = pick_tile(max_blocks, (hidden + block_n - 1) // block_n, group_m)
    if block >= tl.load(num_blocks):
        return
    expert = tl.load(block_expert + block)
    num_rows = tl.load(block_rows + block)
    first = block * block_m
    if has_halves:
        if num_rows <= block_m // 2:
            down_tile(
                h_half, weight, y, slots, expert, num_rows, first, tile,
                hidden, inner, block_m // 2, block_n, block_k, precision, has_tma,
            )  # fmt: skip
        else:
            down_tile(
                h, weight, y, slots, expert, num_rows, first, tile,
                hidden, inner, block_m, block_n, block_k, precision, has_tma,
            )  # fmt: skip
    else:
        down_tile(
            h, weight, y, slots, expert, num_rows, first, tile,
            hidden, inner, block_m, block_n, block_k, precision, has_tma,
        )  # fmt: skip


@jit
def down_tile(  # noqa: PLR0913  # as its kernel
    h: tl.pointer_type,
    weight: tl.pointer_type,
    y: tl.pointer_type,
    slots: tl.pointer_type,
    expert: tl.tensor,
    num_rows: tl.tensor,
    first: tl.tensor,
    tile: tl.tensor,
    hidden: tl.constexpr,
    inner: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    precision: tl.constexpr,
    has_tma: tl.constexpr,
) -> None:
    """Compute one tile of `down_kernel`."""
    row = tl.arange(0, block_m)
    is_row = row < num_rows
    place = first + row
    column = tile * block_n + tl.arange(0, block_n)
    is_column = column < hidden
    inside = tl.arange(0, block_k)
    if not has_tma:
        weight_row = expert.to(tl.int64) * hidden + tl.where(is_column, column, 0)
        weight_at = weight + weight_row[None, :] * inner + inside[:, None]
        h_at = h + place.to(tl.int64)[:, None] * inner + inside[None, :]
    total = tl.zeros([block_m, block_n], tl.float32)
    for k in range(0, inner, block_k):
        if has_tma:
            h_tile = h.load([first, k])
            weight_tile = tl.trans(weight.load([expert * hidden + tile * block_n, k]))
        elif inner % block_k == 0:
            h_tile = tl.load(h_at + k, mask=is_row[:, None], other=0.0)
            weight_tile = tl.load(weight_at + k)
        else:
            is_in = inside < inner - k
            h_tile = tl.load(h_at + k, mask=is_row[:, None] & is_in[None, :], other=0.0)
            weight_tile = tl.load(weight_at + k, mask=is_in[:, None], other=0.0)
        total = multiply(h_tile, weight_tile, total, precision)
    slot = tl.load(slots + place, mask=is_row, other=0)
    y_at = y + slot.to(tl.int64)[:, None] * hidden + column[None, :]
    tl.store(y_at, total.to(y.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@jit
def combine_kernel(
    y: tl.pointer_type,
    out: tl.pointer_type,
    hidden: tl.constexpr,
    top_k: tl.constexpr,
    block_n: tl.constexpr,
    has_overlap: tl.constexpr,
) -> None:
    """Sum each token's choices in their order: ``[num_tokens, top_k, hidden]`` over ``top_k``.

    The grid is tokens by columns of ``block_n``.
    """
    wait_for_previous(has_overlap)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block_n + tl.arange(0, block_n)
    is_column = column < hidden
    at = y + token * (top_k * hidden) + column
    total = tl.zeros([block_n], tl.float32)
    for choice in tl.static_range(top_k):
        total += tl.load(at + choice * hidden, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), mask=is_column)
