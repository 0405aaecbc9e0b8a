"""The buffers between the kernels: allocated once, the same for all layers."""

from __future__ import annotations

import torch

from minisgl_moe_triton.plan import LayerShape, Step

SORT_ROWS = 32
"""Tokens of one program of routing, where several programs route."""


class Workspace:
    """Room for ``max_tokens`` tokens; what a layer leaves here, the next one overwrites.

    Attributes:
        width: Experts up to a power of two.
        sort_rows: Tokens of one program where several programs route.
        weights: ``[max_tokens, top_k]`` float32 routing weights.
        experts: ``[max_tokens, top_k]`` int32.
        counts: ``[programs, width]`` int32.
        slots: ``[rows]`` int32 slots in block order.
        block_expert: ``[blocks]`` int32.
        block_rows: ``[blocks]`` int32.
        num_blocks: ``[1]`` int32.
        h: ``[rows, intermediate_size]``, between the products, in block order.
        y: ``[max_tokens * top_k, hidden_size]`` results before the sum, in slot order.
    """

    def __init__(
        self, shape: LayerShape, steps: tuple[Step, ...], max_tokens: int, device: torch.device
    ) -> None:
        """Allocate."""
        dtype: torch.dtype = getattr(torch, shape.dtype)
        blocks, rows = _most(shape, steps, max_tokens)
        self.width = max(16, 1 << (shape.num_experts - 1).bit_length())
        self.sort_rows = max(1, min(SORT_ROWS, 8192 // self.width))
        programs = -(-max_tokens // self.sort_rows)
        num_slots = max_tokens * shape.top_k

        def ints(*size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.int32, device=device)

        self.weights = torch.empty(num_slots, dtype=torch.float32, device=device)
        self.experts = ints(num_slots)
        self.counts = ints(programs, self.width)
        self.slots = ints(rows)
        self.block_expert = ints(blocks)
        self.block_rows = ints(blocks)
        self.num_blocks = ints(1)
        # Rows that no slot fills are multiplied too, by the loads that take whole tiles. What
        # they give is never stored, but it should not be slow or trap: start from zeros.
        self.h = torch.zeros((rows, shape.intermediate_size), dtype=dtype, device=device)
        self.y = torch.empty((num_slots, shape.hidden_size), dtype=dtype, device=device)


def _most(shape: LayerShape, steps: tuple[Step, ...], max_tokens: int) -> tuple[int, int]:
    """Return the most blocks and the most rows that any number of tokens needs."""
    blocks = rows = 0
    for i, step in enumerate(steps):
        is_last = i == len(steps) - 1
        num_tokens = max_tokens if is_last else min(step.max_tokens, max_tokens)
        needed = shape.max_blocks(num_tokens, step.block_m)
        blocks, rows = max(blocks, needed), max(rows, needed * step.block_m)
    return blocks, rows
