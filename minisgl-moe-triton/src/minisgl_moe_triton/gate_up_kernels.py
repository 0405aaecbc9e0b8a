"""The first product: gate and up of the tokens of one expert, and the activation."""

from __future__ import annotations

import triton.language as tl

from minisgl_moe_triton.grouped_kernels import multiply, pick_tile
from minisgl_moe_triton.route_kernels import wait_for_previous
from minisgl_moe_triton.triton_jit import jit


@jit
def gate_up_kernel(  # noqa: PLR0913  # a kernel takes its arguments one by one
    x: tl.pointer_type,
    weight: tl.pointer_type,
    h: tl.pointer_type,
    slots: tl.pointer_type,
    route_weights: tl.pointer_type,
    block_expert: tl.pointer_type,
    block_rows: tl.pointer_type,
    num_blocks: tl.pointer_type,
    max_blocks: tl.tensor,
    hidden: tl.constexpr,
    inner: tl.constexpr,
    top_k: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    group_m: tl.constexpr,
    has_halves: tl.constexpr,
    precision: tl.constexpr,
    has_tma: tl.constexpr,
    has_overlap: tl.constexpr,
) -> None:
    """Compute ``h = silu(gate(x)) * up(x) * routing weight``, rows in block order.

    The routing weight is applied here, before ``h`` is rounded, and not to the second product,
    which is linear: one rounding less.

    ``x`` is ``[num_tokens, hidden]``, ``weight`` ``[num_experts, 2 * inner, hidden]`` and ``h``
    ``[max_blocks * block_m, inner]``. Rows of ``h`` that no slot fills are not written. With
    ``has_halves``, a block of which at most half is in use is computed as half a block; with
    ``has_tma``, ``weight`` is a descriptor of its rows, and of the rows ``inner`` below them, in
    blocks of ``[2, block_n, block_k]``.
    """
    wait_for_previous(has_overlap)
    block, tile = pick_tile(max_blocks, (inner + block_n - 1) // block_n, group_m)
    if block >= tl.load(num_blocks):
        return
    expert = tl.load(block_expert + block)
    num_rows = tl.load(block_rows + block)
    first = block * block_m
    if has_halves:
        if num_rows <= block_m // 2:
            gate_up_tile(
                x, weight, h, slots, route_weights, expert, num_rows, first, tile,
                hidden, inner, top_k, block_m // 2, block_n, block_k, precision, has_tma,
            )  # fmt: skip
        else:
            gate_up_tile(
                x, weight, h, slots, route_weights, expert, num_rows, first, tile,
                hidden, inner, top_k, block_m, block_n, block_k, precision, has_tma,
            )  # fmt: skip
    else:
        gate_up_tile(
            x, weight, h, slots, route_weights, expert, num_rows, first, tile,
            hidden, inner, top_k, block_m, block_n, block_k, precision, has_tma,
        )  # fmt: skip


@jit
def gate_up_tile(  # noqa: PLR0913  # as its kernel
    x: tl.pointer_type,
    weight: tl.pointer_type,
    h: tl.pointer_type,
    slots: tl.pointer_type,
    route_weights: tl.pointer_type,
    expert: tl.tensor,
    num_rows: tl.tensor,
    first: tl.tensor,
    tile: tl.tensor,
    hidden: tl.constexpr,
    inner: tl.constexpr,
    top_k: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    precision: tl.constexpr,
    has_tma: tl.constexpr,
) -> None:
    """Compute one tile of `gate_up_kernel`."""
    row = tl.arange(0, block_m)
    is_row = row < num_rows
    place = first + row
    slot = tl.load(slots + place, mask=is_row, other=0)
    x_row = x + (slot // top_k).to(tl.int64) * hidden
    if has_tma:
        gate, up = multiply_described(
            x_row, weight, is_row, expert * (2 * inner) + tile * block_n,
            hidden, block_m, block_n, block_k, precision,
        )  # fmt: skip
    else:
        gate, up = multiply_pairs(
            x_row, weight, is_row, expert, tile,
            hidden, inner, block_m, block_n, block_k, precision,
        )  # fmt: skip
    scale = tl.load(route_weights + slot, mask=is_row, other=0.0)
    result = gate / (1.0 + tl.exp(-gate)) * up * scale[:, None]
    column = tile * block_n + tl.arange(0, block_n)
    h_at = h + place.to(tl.int64)[:, None] * inner + column[None, :]
    is_inside = is_row[:, None] & (column < inner)[None, :]
    tl.store(h_at, result.to(h.dtype.element_ty), mask=is_inside)


@jit
def load_x(
    x_row: tl.tensor,
    is_row: tl.tensor,
    k: tl.tensor,
    hidden: tl.constexpr,
    block_k: tl.constexpr,
) -> tl.tensor:
    """Load ``[block_m, block_k]`` of the rows at ``x_row``, zeros past their end."""
    inside = k + tl.arange(0, block_k)
    if hidden % block_k == 0:
        mask = is_row[:, None]
    else:
        mask = is_row[:, None] & (inside < hidden)[None, :]
    return tl.load(x_row[:, None] + inside[None, :], mask=mask, other=0.0)


@jit
def multiply_described(  # noqa: PLR0913  # as its kernel
    x_row: tl.tensor,
    weight: tl.tensor,
    is_row: tl.tensor,
    gate_row: tl.tensor,
    hidden: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    precision: tl.constexpr,
) -> tl.tensor:
    """Return gate and up from one product, the rows of both brought by one load."""
    both = tl.zeros([block_m, 2 * block_n], tl.float32)
    for k in range(0, hidden, block_k):
        x_tile = load_x(x_row, is_row, k, hidden, block_k)
        pair = tl.reshape(weight.load([0, gate_row, k]), [2 * block_n, block_k])
        both = multiply(x_tile, tl.trans(pair), both, precision)
    return tl.split(tl.permute(tl.reshape(both, [block_m, 2, block_n]), (0, 2, 1)))


@jit
def multiply_pairs(  # noqa: PLR0913  # as its kernel
    x_row: tl.tensor,
    weight: tl.pointer_type,
    is_row: tl.tensor,
    expert: tl.tensor,
    tile: tl.tensor,
    hidden: tl.constexpr,
    inner: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    precision: tl.constexpr,
) -> tl.tensor:
    """Return gate and up from one product, whose columns alternate between the two.

    It reads ``x`` once, and a gate and its up end up side by side in the same thread.
    """
    pair = tl.arange(0, 2 * block_n)
    column = tile * block_n + pair // 2
    # Columns past the end read the first one's weights; their results are not stored.
    weight_row = expert.to(tl.int64) * (2 * inner) + tl.where(column < inner, column, 0)
    weight_row += pair % 2 * inner
    inside = tl.arange(0, block_k)
    weight_at = weight + weight_row[None, :] * hidden + inside[:, None]
    both = tl.zeros([block_m, 2 * block_n], tl.float32)
    for k in range(0, hidden, block_k):
        x_tile = load_x(x_row, is_row, k, hidden, block_k)
        if hidden % block_k == 0:
            weight_tile = tl.load(weight_at + k)
        else:
            weight_tile = tl.load(weight_at + k, mask=(inside < hidden - k)[:, None], other=0.0)
        both = multiply(x_tile, weight_tile, both, precision)
    return tl.split(tl.reshape(both, [block_m, block_n, 2]))
