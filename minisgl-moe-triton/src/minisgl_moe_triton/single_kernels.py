"""One token: two kernels that read the chosen experts' weights once and do nothing else.

Each program works the routing out for itself, which takes less time than a launch. The second
kernel sums over all choices of its columns, so there is no third. Where launches overlap, it has
routed and loaded its first weights before it waits for the first kernel.
"""

from __future__ import annotations

import triton.language as tl

from minisgl_moe_triton.route_kernels import wait_for_previous
from minisgl_moe_triton.triton_jit import jit


@jit
def rank_experts(
    logits: tl.pointer_type, num_experts: tl.constexpr, width: tl.constexpr
) -> tl.tensor:
    """Return ``[width]`` float32 logits and int32 ranks; rank 0 is the highest, ties by number.

    Each expert counts those that come before it: no step waits for another, unlike ``top_k``
    rounds of a maximum. NaN ranks lowest, as in `choose`.
    """
    lowest = float("-inf")
    column = tl.arange(0, width)
    scores = tl.load(logits + column, mask=column < num_experts, other=lowest).to(tl.float32)
    mine = tl.where(scores == scores, scores, lowest)[None, :]
    beaten = tl.zeros([16, width], tl.int32)
    for first in tl.static_range(
        0, num_experts, 16
    ):  # all pairs at once would not fit the registers
        rival = first + tl.arange(0, 16)[:, None]
        theirs = tl.load(logits + rival, mask=rival < num_experts, other=lowest).to(tl.float32)
        theirs = tl.where(theirs == theirs, theirs, lowest)
        is_before = (theirs > mine) | ((theirs == mine) & (rival < column[None, :]))
        beaten += is_before.to(tl.int32)
    return scores, tl.sum(beaten, axis=0)


@jit
def single_gate_up_kernel(  # noqa: PLR0913  # a kernel takes its arguments one by one
    x: tl.pointer_type,
    logits: tl.pointer_type,
    weight: tl.pointer_type,
    h: tl.pointer_type,
    num_experts: tl.constexpr,
    hidden: tl.constexpr,
    inner: tl.constexpr,
    top_k: tl.constexpr,
    is_renormalized: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    stages: tl.constexpr,
    width: tl.constexpr,
    has_overlap: tl.constexpr,
) -> None:
    """Compute ``h``, ``[top_k, inner]``, as `gate_up_kernel`; the grid is columns by ``top_k``."""
    wait_for_previous(has_overlap)
    choice = tl.program_id(1)
    scores, rank = rank_experts(logits, num_experts, width)
    column = tl.arange(0, width)
    expert = tl.sum(tl.where(rank == choice, column, 0), axis=0)
    row = tl.program_id(0) * block_n + tl.arange(0, block_n)
    is_row = row < inner
    inside = tl.arange(0, block_k)
    first_row = expert.to(tl.int64) * (2 * inner) + tl.where(is_row, row, 0)
    gate_at = weight + first_row[:, None] * hidden + inside[None, :]
    up_at = gate_at + inner * hidden
    gates = tl.zeros([block_n, block_k], tl.float32)
    ups = tl.zeros([block_n, block_k], tl.float32)
    for k in tl.range(0, hidden, block_k, num_stages=stages):
        is_in = inside < hidden - k
        gate_tile = tl.load(gate_at + k, mask=is_in[None, :], other=0.0)
        up_tile = tl.load(up_at + k, mask=is_in[None, :], other=0.0)
        x_tile = tl.load(x + k + inside, mask=is_in, other=0.0).to(tl.float32)[None, :]
        gates += gate_tile.to(tl.float32) * x_tile
        ups += up_tile.to(tl.float32) * x_tile
    share = tl.exp(scores - tl.max(scores, axis=0))
    total = tl.sum(share, axis=0)
    if is_renormalized:
        chosen = tl.sum(tl.where(rank < top_k, share, 0.0), axis=0)
        total = tl.where(total == total, chosen, total)  # NaN stays, though it is never chosen
    scale = tl.sum(tl.where(rank == choice, share, 0.0), axis=0) / total
    gate = tl.sum(gates, axis=1)
    result = gate / (1.0 + tl.exp(-gate)) * tl.sum(ups, axis=1) * scale
    tl.store(h + choice * inner + row, result.to(h.dtype.element_ty), mask=is_row)


@jit
def single_down_kernel(  # noqa: PLR0913  # a kernel takes its arguments one by one
    h: tl.pointer_type,
    logits: tl.pointer_type,
    weight: tl.pointer_type,
    out: tl.pointer_type,
    num_experts: tl.constexpr,
    hidden: tl.constexpr,
    inner: tl.constexpr,
    top_k: tl.constexpr,
    choices: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    width: tl.constexpr,
    has_overlap: tl.constexpr,
) -> None:
    """Compute ``out``, ``[hidden]``, from ``h``; ``choices`` is ``top_k`` up to a power of two."""
    _, rank = rank_experts(logits, num_experts, width)
    choice = tl.arange(0, choices)
    column = tl.arange(0, width)
    is_mine = rank[None, :] == choice[:, None]
    expert = tl.sum(tl.where(is_mine, column[None, :], 0), axis=1)
    row = tl.program_id(0) * block_n + tl.arange(0, block_n)
    is_row = row < hidden
    inside = tl.arange(0, block_k)
    first_row = expert.to(tl.int64)[:, None] * hidden + tl.where(is_row, row, 0)[None, :]
    weight_at = weight + first_row[:, :, None] * inner + inside[None, None, :]
    is_choice = (choice < top_k)[:, None, None]
    steps = inside[None, None, :]
    tile = tl.load(weight_at, mask=is_choice & (steps < inner), other=0.0)
    is_second = is_choice & (steps < inner - block_k)
    following = tl.load(weight_at + block_k, mask=is_second, other=0.0)
    # Nothing above depends on the kernel before: routing and weights are older.
    wait_for_previous(has_overlap)
    h_at = h + choice[:, None, None] * inner + steps
    totals = tl.zeros([choices, block_n, block_k], tl.float32)
    for k in range(0, inner, block_k):
        h_tile = tl.load(h_at + k, mask=is_choice & (steps < inner - k), other=0.0)
        is_third = is_choice & (steps < inner - k - 2 * block_k)
        third = tl.load(weight_at + k + 2 * block_k, mask=is_third, other=0.0)
        totals += tile.to(tl.float32) * h_tile.to(tl.float32)
        tile = following
        following = third
    result = tl.sum(tl.sum(totals, axis=2), axis=0)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=is_row)
