"""Trying tiles: each product on its own, all that compile, the quickest kept."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from minisgl.errors import CapacityError
from minisgl_moe_triton.launch import Launcher, LayerInputs
from minisgl_moe_triton.measure import LayerBench
from minisgl_moe_triton.plan import MAX_SINGLE_EXPERTS, LayerShape, Step, TileShape
from minisgl_moe_triton.workspace import Workspace

logger = logging.getLogger(__name__)

_COMPILERS = 12
_NO_LIMIT = 1 << 30

Sizes = tuple[int, int, int, int]
Calls = dict[TileShape, Callable[[LayerInputs], object]]

# (block_n, block_k, num_warps, num_stages), for gate and up together and for down.
_SINGLE: tuple[tuple[Sizes, ...], tuple[Sizes, ...]] = (
    (
        (8, 256, 4, 4),
        (8, 256, 4, 3),
        (8, 256, 4, 5),
        (8, 256, 2, 4),
        (16, 128, 4, 4),
        (16, 128, 4, 6),
        (4, 512, 4, 4),
        (4, 256, 2, 4),
        (8, 128, 2, 6),
        (16, 256, 4, 1),
        (16, 256, 8, 3),
    ),
    (
        (16, 128, 8, 1),
        (8, 128, 4, 1),
        (8, 128, 8, 1),
        (16, 64, 8, 1),
        (16, 64, 4, 1),
        (8, 64, 4, 1),
        (32, 64, 8, 1),
    ),
)
_THIN: tuple[tuple[Sizes, ...], tuple[Sizes, ...]] = (
    (
        (32, 128, 4, 4),
        (32, 128, 4, 3),
        (32, 256, 4, 3),
        (64, 128, 4, 3),
        (64, 128, 8, 4),
        (64, 64, 4, 4),
    ),
    ((64, 128, 4, 4), (64, 128, 4, 3), (32, 256, 4, 3), (128, 128, 4, 3), (64, 256, 4, 3)),
)
_WIDE: tuple[tuple[Sizes, ...], tuple[Sizes, ...]] = (
    (
        (64, 64, 4, 3),
        (64, 64, 4, 4),
        (64, 64, 8, 3),
        (64, 64, 8, 4),
        (128, 64, 8, 4),
        (128, 64, 8, 3),
        (128, 64, 4, 3),
    ),
    (
        (128, 64, 4, 3),
        (128, 64, 4, 4),
        (128, 64, 8, 3),
        (256, 64, 8, 4),
        (256, 64, 8, 3),
        (256, 64, 4, 3),
        (128, 128, 8, 3),
    ),
)


@dataclass(frozen=True, slots=True)
class Timed:
    """A tile and its time in microseconds."""

    tile: TileShape
    time_us: float


def tune(bench: LayerBench, token_counts: Sequence[int], sm: int) -> tuple[Step, ...]:
    """Find steps for a shape.

    Args:
        bench: Weights and tokens.
        token_counts: Where to measure, each at least 1.
        sm: Compute capability of the GPU.

    Returns:
        Steps by rising ``max_tokens``; each serves the token counts that are nearest to its own.

    Raises:
        CapacityError: No tile fits the GPU.
    """
    counts = sorted(set(token_counts))
    found = [_tune_count(bench, count, sm) for count in counts]
    limits = [
        1 if step.block_m == 1 else math.isqrt(low * high)
        for step, (low, high) in zip(found, itertools.pairwise(counts), strict=False)
    ]
    return tuple(
        Step(limit, step.block_m, step.gate_up, step.down)
        for step, limit in zip(found, [*limits, _NO_LIMIT], strict=True)
    )


def candidates(shape: LayerShape, num_tokens: int, sm: int) -> Iterator[Step]:
    """Yield what to try for a token count; only tiles of the same ``block_m`` go together."""
    if num_tokens == 1 and shape.num_experts <= MAX_SINGLE_EXPERTS:
        yield from _steps(1, _SINGLE, (False,), 1)
        return
    rows = num_tokens * shape.top_k / shape.num_experts
    loads = (False, True) if sm >= 90 and shape.dtype != "float32" else (False,)
    for block_m in (16, 32, 64, 128):
        if not min(rows / 2, 64) <= block_m <= max(16, 3 * rows):
            continue  # most rows of a block would be free, or most weights read twice
        yield from _steps(block_m, _THIN if block_m <= 32 else _WIDE, loads, num_tokens)


def _steps(
    block_m: int,
    lists: tuple[tuple[Sizes, ...], tuple[Sizes, ...]],
    loads: tuple[bool, ...],
    num_tokens: int,
) -> Iterator[Step]:
    gate_ups, downs = (
        [
            TileShape(block_n, block_k, num_warps, num_stages, has_tma=has_tma)
            for block_n, block_k, num_warps, num_stages in each
            for has_tma in loads
        ]
        for each in lists
    )
    for gate_up, down in itertools.zip_longest(gate_ups, downs):
        yield Step(num_tokens, block_m, gate_up or gate_ups[0], down or downs[0])


def _tune_count(bench: LayerBench, num_tokens: int, sm: int) -> Step:
    shape = bench.shape
    steps = list(candidates(shape, num_tokens, sm))
    workspace = Workspace(shape, tuple(steps), num_tokens, bench.device)
    launcher = Launcher(shape, True, workspace, has_overlap=sm >= 90)
    sets = bench.inputs(num_tokens) if num_tokens == 1 else bench.inputs(num_tokens, 1) * 3
    out = torch.empty_like(sets[0].hidden_states)
    best: tuple[float, Step] | None = None
    for block_m in sorted({step.block_m for step in steps}):
        group = [step for step in steps if step.block_m == block_m]
        max_blocks = shape.max_blocks(num_tokens, block_m)
        if block_m != 1:  # once: what is timed then reads the same list of blocks
            launcher.route(sets[0].router_logits, block_m)
        gate_up = _best(bench, sets, _gate_up_calls(launcher, group, max_blocks))
        down = _best(bench, sets, _down_calls(launcher, group, max_blocks, out))
        if gate_up is None or down is None:
            continue
        time_us = gate_up.time_us + down.time_us
        if best is None or time_us < best[0]:
            best = time_us, Step(num_tokens, block_m, gate_up.tile, down.tile)
    if best is None:
        raise CapacityError(f"no tile for {num_tokens} tokens of {shape} fits this GPU")
    logger.info("%d tokens: %.1f us in both products with %s", num_tokens, *best)
    return best[1]


def _gate_up_calls(launcher: Launcher, group: list[Step], max_blocks: int) -> Calls:
    def call(step: Step, inputs: LayerInputs) -> None:
        if step.block_m == 1:
            launcher.single_gate_up(inputs, step.gate_up)
        else:
            launcher.gate_up(inputs, step, max_blocks)

    return {step.gate_up: partial(call, step) for step in group}


def _down_calls(launcher: Launcher, group: list[Step], max_blocks: int, out: torch.Tensor) -> Calls:
    def call(step: Step, inputs: LayerInputs) -> None:
        if step.block_m == 1:
            launcher.single_down(inputs, step.down, out)
        else:
            launcher.down(inputs, step, max_blocks)

    return {step.down: partial(call, step) for step in group}


def _best(bench: LayerBench, sets: list[LayerInputs], calls: Calls) -> Timed | None:
    """Compile all tiles side by side, time those that work, return the quickest."""
    with ThreadPoolExecutor(_COMPILERS) as pool:
        works = list(pool.map(lambda call: _can_run(call, sets[0]), calls.values()))
    torch.cuda.synchronize()
    times = [
        Timed(tile, bench.time_us(call, sets))
        for (tile, call), is_usable in zip(calls.items(), works, strict=True)
        if is_usable
    ]
    for each in sorted(times, key=lambda timed: timed.time_us):
        logger.debug("%.1f us with %s", each.time_us, each.tile)
    return min(times, key=lambda timed: timed.time_us, default=None)


def _can_run(call: Callable[[LayerInputs], object], inputs: LayerInputs) -> bool:
    try:
        call(inputs)
    except (OutOfResources, CompilationError, PTXASError) as error:
        logger.debug("left out: %s", error)
        return False
    return True
