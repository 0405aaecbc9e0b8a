"""Routing, and sorting the chosen (token, choice) slots by expert, all on the device.

A slot is ``token * top_k + choice``. The slots of one expert fill whole blocks of ``block_m`` rows;
the last block of an expert may have rows to spare, which nobody reads. What the products need to
know is then: the slots in block order, each block's expert and number of rows, and the number of
blocks. All of it is computed without the host, and within an expert slots stay in token order, so
that a result never depends on a race.

A few tokens are one program's work. More take two launches: each program counts its own tokens,
then each adds up the counts of all, which takes less than a launch in between, and places its own.
"""

from __future__ import annotations

import triton.language as tl

from minisgl_moe_triton.triton_jit import jit


@jit
def wait_for_previous(has_overlap: tl.constexpr) -> None:
    """Wait for the kernel before this one, and let the one behind it start its launch.

    Every program of every kernel waits before anything else, so whatever ran earlier in the stream
    is complete, also where kernels overlap their launches.
    """
    if has_overlap:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@jit
def choose(
    scores: tl.tensor,
    columns: tl.tensor,
    num_experts: tl.constexpr,
    top_k: tl.constexpr,
    is_renormalized: tl.constexpr,
) -> tl.tensor:
    """Choose the ``top_k`` experts of each row, of equal ones the first.

    NaN counts as the lowest score, so that each row has ``top_k`` different experts whatever comes
    in; its weights are NaN all the same.

    Args:
        scores: ``[rows, width]`` float32 logits.
        columns: ``[1, width]`` expert numbers; from ``num_experts`` on there are none.
        num_experts: Experts.
        top_k: Choices of a row.
        is_renormalized: Whether the weights of the chosen are scaled to sum to 1.

    Returns:
        ``order``: ``[rows, width]`` int32 number of the choice, ``top_k`` where not chosen; and
        ``weights``: ``[rows, width]`` float32, valid where chosen.
    """
    is_expert = columns < num_experts
    # Keys that order as the scores do, 0 and -0 being equal, with room for two below them all:
    # of NaN, and of what was chosen or is no expert.
    taken = -2147483647
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = tl.where(scores == scores, keys, taken + 1)
    keys = tl.where(is_expert, keys, taken)
    order = tl.zeros(scores.shape, tl.int32) + top_k
    for choice in range(top_k):
        first = tl.argmax(keys, axis=1, tie_break_left=True)
        is_first = columns == first[:, None]
        order = tl.where(is_first, choice, order)
        keys = tl.where(is_first, taken, keys)
    peak = tl.max(tl.where(is_expert, scores, float("-inf")), axis=1)
    share = tl.where(is_expert, tl.exp(scores - peak[:, None]), 0.0)
    total = tl.sum(share, axis=1)
    if is_renormalized:
        chosen = tl.sum(tl.where(order < top_k, share, 0.0), axis=1)
        total = tl.where(total == total, chosen, total)  # NaN stays, though it is never chosen
    return order, share / total[:, None]


@jit
def first_blocks(counts: tl.tensor, block_m: tl.constexpr) -> tl.tensor:
    """Return the first block of each expert, ``[width]`` int32, from its slots."""
    blocks = (counts + block_m - 1) // block_m
    return tl.cumsum(blocks, axis=0) - blocks


@jit
def store_blocks(  # noqa: PLR0913  # as a kernel
    counts: tl.tensor,
    first: tl.tensor,
    columns: tl.tensor,
    block_expert: tl.pointer_type,
    block_rows: tl.pointer_type,
    num_blocks: tl.pointer_type,
    block_m: tl.constexpr,
    most: tl.constexpr,
) -> None:
    """Write the list of blocks.

    Args:
        counts: ``[width]`` int32 slots of each expert.
        first: What `first_blocks` makes of them.
        columns: ``[width]`` expert numbers.
        block_expert: int32 expert of each block.
        block_rows: int32 rows in use of each block.
        num_blocks: ``[1]`` int32.
        block_m: Rows of a block.
        most: The most blocks that one expert can have; 0 where only the counts say.
    """
    blocks = (counts + block_m - 1) // block_m
    tl.store(num_blocks, tl.sum(blocks, axis=0))
    if most == 0:
        rounds = tl.max(blocks, axis=0)
    else:
        rounds = most
    for i in range(rounds):
        is_used = i < blocks
        rows = tl.minimum(counts - i * block_m, block_m)
        tl.store(block_expert + first + i, columns, mask=is_used)
        tl.store(block_rows + first + i, rows, mask=is_used)


@jit
def route_and_sort_kernel(  # noqa: PLR0913  # a kernel takes its arguments one by one
    logits: tl.pointer_type,
    weights: tl.pointer_type,
    slots: tl.pointer_type,
    block_expert: tl.pointer_type,
    block_rows: tl.pointer_type,
    num_blocks: tl.pointer_type,
    num_tokens: tl.tensor,
    num_experts: tl.constexpr,
    top_k: tl.constexpr,
    is_renormalized: tl.constexpr,
    block_m: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
    has_overlap: tl.constexpr,
) -> None:
    """Route and sort up to ``rows`` tokens in one program; the grid is ``(1,)``."""
    wait_for_previous(has_overlap)
    token = tl.arange(0, rows)[:, None]
    column = tl.arange(0, width)
    columns = column[None, :]
    is_token = token < num_tokens
    is_inside = is_token & (columns < num_experts)
    scores = tl.load(logits + token * num_experts + columns, mask=is_inside, other=0.0)
    order, weight = choose(scores.to(tl.float32), columns, num_experts, top_k, is_renormalized)
    is_chosen = (order < top_k) & is_token
    slot = token * top_k + order
    tl.store(weights + slot, weight, mask=is_chosen)
    chosen = is_chosen.to(tl.int32)
    counts = tl.sum(chosen, axis=0)
    most = (rows + block_m - 1) // block_m
    first = first_blocks(counts, block_m)
    store_blocks(counts, first, column, block_expert, block_rows, num_blocks, block_m, most)
    place = first[None, :] * block_m + tl.cumsum(chosen, axis=0) - chosen
    tl.store(slots + place, slot, mask=is_chosen)


@jit
def route_kernel(  # noqa: PLR0913  # a kernel takes its arguments one by one
    logits: tl.pointer_type,
    weights: tl.pointer_type,
    experts: tl.pointer_type,
    counts: tl.pointer_type,
    num_tokens: tl.tensor,
    num_experts: tl.constexpr,
    top_k: tl.constexpr,
    is_renormalized: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
    has_overlap: tl.constexpr,
) -> None:
    """Choose experts and count them, ``rows`` tokens a program.

    Writes ``weights`` and ``experts``, ``[num_tokens, top_k]`` float32 and int32, and ``counts``,
    ``[programs, width]`` int32.
    """
    wait_for_previous(has_overlap)
    program = tl.program_id(0)
    token = program * rows + tl.arange(0, rows)[:, None]
    columns = tl.arange(0, width)[None, :]
    is_token = token < num_tokens
    is_inside = is_token & (columns < num_experts)
    scores = tl.load(logits + token * num_experts + columns, mask=is_inside, other=0.0)
    order, weight = choose(scores.to(tl.float32), columns, num_experts, top_k, is_renormalized)
    is_chosen = (order < top_k) & is_token
    slot = token * top_k + order
    tl.store(weights + slot, weight, mask=is_chosen)
    tl.store(experts + slot, columns + tl.zeros_like(order), mask=is_chosen)
    here = tl.sum(is_chosen.to(tl.int32), axis=0)
    tl.store(counts + program * width + tl.arange(0, width), here)


@jit
def sort_kernel(  # noqa: PLR0913  # a kernel takes its arguments one by one
    experts: tl.pointer_type,
    counts: tl.pointer_type,
    slots: tl.pointer_type,
    block_expert: tl.pointer_type,
    block_rows: tl.pointer_type,
    num_blocks: tl.pointer_type,
    num_tokens: tl.tensor,
    num_programs: tl.tensor,
    top_k: tl.constexpr,
    block_m: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
    count_rows: tl.constexpr,
    has_overlap: tl.constexpr,
) -> None:
    """Write each slot at its place, ``rows`` tokens a program as in `route_kernel`.

    The first program also writes the list of blocks.
    """
    wait_for_previous(has_overlap)
    program = tl.program_id(0)
    column = tl.arange(0, width)
    earlier, total = add_counts(counts, program, num_programs, width, count_rows)
    first = first_blocks(total, block_m)
    if program == 0:
        store_blocks(total, first, column, block_expert, block_rows, num_blocks, block_m, 0)
    token = program * rows + tl.arange(0, rows)
    order = tl.zeros([rows, width], tl.int32) + top_k
    for choice in range(top_k):
        expert = tl.load(experts + token * top_k + choice, mask=token < num_tokens, other=width)
        order = tl.where(expert[:, None] == column[None, :], choice, order)
    is_chosen = order < top_k
    chosen = is_chosen.to(tl.int32)
    base = first * block_m + earlier
    place = base[None, :] + tl.cumsum(chosen, axis=0) - chosen
    tl.store(slots + place, token[:, None] * top_k + order, mask=is_chosen)


@jit
def add_counts(
    counts: tl.pointer_type,
    program: tl.tensor,
    num_programs: tl.tensor,
    width: tl.constexpr,
    count_rows: tl.constexpr,
) -> tl.tensor:
    """Return each expert's slots in programs before this one, and in all of them."""
    column = tl.arange(0, width)[None, :]
    earlier = tl.zeros([count_rows, width], tl.int32)
    total = tl.zeros([count_rows, width], tl.int32)
    for first in range(0, num_programs, count_rows):
        other = first + tl.arange(0, count_rows)[:, None]
        here = tl.load(counts + other * width + column, mask=other < num_programs, other=0)
        earlier += tl.where(other < program, here, 0)
        total += here
    return tl.sum(earlier, axis=0), tl.sum(total, axis=0)
