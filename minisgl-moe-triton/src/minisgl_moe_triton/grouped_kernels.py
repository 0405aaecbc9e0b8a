"""The two products over blocks of slots of one expert, and the sum over a token's choices.

The grid is the most blocks that a number of tokens can need; programs beyond the number of blocks,
which only the device knows, end at once. So one launch, and one captured graph, serves every
routing. Programs next to each other share an expert's weights or a block's activations, which the
second-level cache then reads once.
"""

from __future__ import annotations

import triton.language as tl

from minisgl_moe_triton.route_kernels import wait_for_previous
from minisgl_moe_triton.triton_jit import jit


@jit
def pick_tile(max_blocks: tl.tensor, num_columns: tl.constexpr, group_m: tl.constexpr) -> tl.tensor:
    """Return the block and the column of tiles of this program.

    Programs run down ``group_m`` blocks before they go on to the next column.
    """
    program = tl.program_id(0)
    first = program // (group_m * num_columns) * group_m
    size = tl.minimum(max_blocks - first, group_m)
    inside = program % (group_m * num_columns)
    return first + inside % size, inside // size


@jit
def multiply(a: tl.tensor, b: tl.tensor, total: tl.tensor, precision: tl.constexpr) -> tl.tensor:
    """Return ``a @ b + total``; ``precision`` is one of Triton's, or ``upcast``.

    ``upcast`` multiplies in float32: the interpreter keeps bfloat16 as integers, and a product of
    those is wrong.
    """
    if precision == "upcast":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    return tl.dot(a, b, total, input_precision=precision)


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
    ``has_tma``, ``weight`` is a descriptor of its rows in blocks of ``[block_n, block_k]``.
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
        gate, up = multiply_both(
            x_row, weight, is_row, expert * (2 * inner) + tile * block_n,
            hidden, inner, block_m, block_n, block_k, precision,
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
def multiply_both(  # noqa: PLR0913  # as its kernel
    x_row: tl.tensor,
    weight: tl.tensor,
    is_row: tl.tensor,
    gate_row: tl.tensor,
    hidden: tl.constexpr,
    inner: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    precision: tl.constexpr,
) -> tl.tensor:
    """Return gate and up as two products, whose weights come by descriptor."""
    gate = tl.zeros([block_m, block_n], tl.float32)
    up = tl.zeros([block_m, block_n], tl.float32)
    for k in range(0, hidden, block_k):
        x_tile = load_x(x_row, is_row, k, hidden, block_k)
        gate = multiply(x_tile, tl.trans(weight.load([gate_row, k])), gate, precision)
        up = multiply(x_tile, tl.trans(weight.load([gate_row + inner, k])), up, precision)
    return gate, up


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
