"""What the two products over blocks of slots of one expert have in common.

The grid is the most blocks that a number of tokens can need; programs beyond the number of blocks,
which only the device knows, end at once. So one launch, and one captured graph, serves every
routing. Programs next to each other share an expert's weights or a block's activations, which the
second-level cache then reads once.
"""

from __future__ import annotations

import triton.language as tl

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
