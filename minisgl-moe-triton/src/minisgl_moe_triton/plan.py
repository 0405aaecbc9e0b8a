"""How a layer is cut up: tiles for each range of token counts."""

from __future__ import annotations

from dataclasses import dataclass, replace

# Shared memory that one block may use, in KiB, by compute capability; 99 where not listed.
_SHARED_KIB = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}
_OTHER_SHARED_KIB = 99
_MAX_STAGES = 4

MAX_SINGLE_EXPERTS = 256
"""Experts up to which one token has kernels of its own: they compare all pairs of experts."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What the choice of tiles depends on.

    Attributes:
        num_experts: Experts of a layer.
        top_k: Experts of a token.
        hidden_size: Width of input and output.
        intermediate_size: Width of one expert on this rank.
        dtype: Such as ``"bfloat16"``.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return 4 if self.dtype == "float32" else 2

    def max_blocks(self, num_tokens: int, block_m: int) -> int:
        """Return the most blocks that any routing of so many tokens can fill."""
        num_slots = num_tokens * self.top_k
        in_use = min(self.num_experts, num_slots)  # each may leave block_m - 1 rows of a block free
        return (num_slots + in_use * (block_m - 1)) // block_m


@dataclass(frozen=True, slots=True)
class TileShape:
    """How one product is cut up.

    Attributes:
        block_n: Columns of a program; of gate and up, so many of each.
        block_k: Elements of the inner dimension at a time.
        num_warps: Warps of a program.
        num_stages: Tiles in flight.
        group_m: Blocks that run side by side before the next columns.
        has_tma: Whether the tensor memory accelerator loads the tiles (of the first product, those
            of the weight), which it can from compute capability 9.0 on.
    """

    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 3
    group_m: int = 1
    has_tma: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """The tiles for up to ``max_tokens`` tokens.

    Attributes:
        max_tokens: Most tokens.
        block_m: Rows of a block; 1 only for a single token, which has kernels of its own.
        gate_up: Tiles of the first product.
        down: Tiles of the second.
        has_halves: Whether a block of which at most half is in use is computed as half a block.
    """

    max_tokens: int
    block_m: int
    gate_up: TileShape
    down: TileShape
    has_halves: bool = False


def default_steps(shape: LayerShape, sm: int | None) -> tuple[Step, ...]:
    """Choose tiles for a shape that nobody tuned.

    Args:
        shape: The layer.
        sm: Compute capability as ``major * 10 + minor``; ``None`` in the interpreter.
    """
    rows_to_block = ((16, 16), (32, 32), (96, 64), (1 << 30, 128))
    steps = [_single_step(shape)] if shape.num_experts <= MAX_SINGLE_EXPERTS else []
    for rows, block_m in rows_to_block:
        if shape.dtype == "float32" and block_m > 32:
            continue  # no tensor cores: a larger tile only spills registers
        max_tokens = max(2, rows * shape.num_experts // shape.top_k)
        gate_up, down = (_default_tile(shape, sm, block_m, is_pair) for is_pair in (True, False))
        steps.append(Step(max_tokens, block_m, gate_up, down, has_halves=block_m == 128))
    steps[-1] = replace(steps[-1], max_tokens=1 << 30)
    return tuple(steps)


def fit_steps(steps: tuple[Step, ...], shape: LayerShape, sm: int | None) -> tuple[Step, ...]:
    """Turn off what a shape or GPU cannot do."""
    has_tma = sm is None or sm >= 90  # the interpreter knows descriptors too

    def fit(tile: TileShape, width: int) -> TileShape:
        is_aligned = width * shape.itemsize % 16 == 0
        return tile if has_tma and is_aligned else replace(tile, has_tma=False)

    return tuple(
        replace(
            step,
            gate_up=fit(step.gate_up, shape.hidden_size),
            down=fit(step.down, shape.intermediate_size),
        )
        for step in steps
    )


def _single_step(shape: LayerShape) -> Step:
    choices = 1 << (shape.top_k - 1).bit_length()
    return Step(
        max_tokens=1,
        block_m=1,
        gate_up=TileShape(block_n=8, block_k=256, num_warps=4, num_stages=4),
        down=TileShape(block_n=max(4, 64 // choices), block_k=128, num_warps=4),
    )


def _default_tile(shape: LayerShape, sm: int | None, block_m: int, is_pair: bool) -> TileShape:
    """Choose a tile; a pair is gate and up, whose accumulators share the registers."""
    if sm is None:  # the interpreter takes its time per operation, not per element
        return TileShape(block_n=128, block_k=256)
    if shape.dtype == "float32":
        return TileShape(block_n=32, block_k=32, num_warps=4, num_stages=2)
    if block_m <= 32:  # bound by the weights: short and deep, several programs a multiprocessor
        tile = TileShape(block_n=32 if is_pair else 64, block_k=128, num_warps=4, num_stages=4)
    else:
        wide = 128 if block_m == 128 and sm == 90 else 64
        tile = TileShape(
            block_n=wide if is_pair else 128,
            block_k=64,
            num_warps=8 if block_m == 128 else 4,
            num_stages=4,
            has_tma=is_pair and wide == 128,
        )
    rows = block_m + tile.block_n * (2 if is_pair else 1)
    stage_bytes = rows * tile.block_k * shape.itemsize
    shared_bytes = _SHARED_KIB.get(sm or 0, _OTHER_SHARED_KIB) << 10
    return replace(tile, num_stages=max(1, min(_MAX_STAGES, shared_bytes // stage_bytes)))
