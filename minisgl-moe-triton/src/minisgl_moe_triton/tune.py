"""Trying tiles: each product on its own, all that compile, the quickest kept."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from minisgl.errors import CapacityError
from minisgl_moe_triton.launch import Launcher, LayerInputs
from minisgl_moe_triton.measure import LayerBench
from minisgl_moe_triton.plan import MAX_SINGLE_EXPERTS, LayerShape, Step, TileShape, default_steps
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


@dataclass(frozen=True, slots=True)
class Group:
    """Tiles that can be combined, since both products have the same blocks of rows.

    Attributes:
        block_m: Rows of a block.
        has_halves: Whether blocks of which at most half is in use are computed as half a block.
        gate_ups: What to try for the first product.
        downs: What to try for the second.
    """

    block_m: int
    has_halves: bool
    gate_ups: tuple[TileShape, ...]
    downs: tuple[TileShape, ...]

    def step(self, gate_up: TileShape, down: TileShape, max_tokens: int) -> Step:
        """Make a step of two of the tiles."""
        return Step(max_tokens, self.block_m, gate_up, down, self.has_halves)


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
    limits = [math.isqrt(low * high) for low, high in itertools.pairwise(counts)]
    steps = [
        replace(step, max_tokens=1 if step.block_m == 1 else limit)
        for step, limit in zip(found, [*limits, _NO_LIMIT], strict=True)
    ]
    if steps[-1].block_m == 1:  # nothing else was measured
        steps += default_steps(bench.shape, sm)[1:]
    return tuple(steps)


def candidates(shape: LayerShape, num_tokens: int, sm: int) -> Iterator[Group]:
    """Yield what to try for a token count."""
    if num_tokens == 1 and shape.num_experts <= MAX_SINGLE_EXPERTS:
        gate_ups, downs = _SINGLE
        yield Group(1, False, _tiles(gate_ups), _tiles(downs))
        return
    rows = num_tokens * shape.top_k / shape.num_experts
    can_gate_up, can_down = (
        sm >= 90 and width * shape.itemsize % 16 == 0
        for width in (shape.hidden_size, shape.intermediate_size)
    )
    for block_m in (16, 32, 64, 128):
        if not min(rows / 2, 64) <= block_m <= max(16, 3 * rows):
            continue  # most rows of a block would be free, or most weights read twice
        gate_ups, downs = _THIN if block_m <= 32 else _WIDE
        tiles = (
            (*_tiles(gate_ups), *(_tiles(gate_ups, True) if can_gate_up else ())),
            (*_tiles(downs), *(_tiles(downs, True) if can_down else ())),
        )
        yield Group(block_m, False, *tiles)
        if block_m == 128:
            yield Group(block_m, True, *tiles)


def _tiles(sizes: Sequence[Sizes], has_tma: bool = False) -> tuple[TileShape, ...]:
    return tuple(TileShape(*each, has_tma=has_tma) for each in sizes)


def _tune_count(bench: LayerBench, num_tokens: int, sm: int) -> Step:
    shape = bench.shape
    groups = list(candidates(shape, num_tokens, sm))
    steps = [group.step(group.gate_ups[0], group.downs[0], num_tokens) for group in groups]
    workspace = Workspace(shape, tuple(steps), num_tokens, bench.device)
    launcher = Launcher(shape, True, workspace, has_overlap=sm >= 90)
    sets = bench.inputs(num_tokens) if num_tokens == 1 else bench.inputs(num_tokens, 1) * 3
    out = torch.empty_like(sets[0].hidden_states)
    found: list[tuple[float, Step]] = []
    for group, first in zip(groups, steps, strict=True):
        if group.block_m != 1:  # once: what is timed then reads the same list of blocks
            launcher.route(sets[0].router_logits, group.block_m)
        gate_up = _best(bench, sets, _gate_up_calls(launcher, group, first))
        down = _best(bench, sets, _down_calls(launcher, group, first, out))
        if gate_up is not None and down is not None:
            step = group.step(gate_up.tile, down.tile, num_tokens)
            found.append((gate_up.time_us + down.time_us, step))
    if not found:
        raise CapacityError(f"no tile for {num_tokens} tokens of {shape} fits this GPU")
    time_us, best = min(found, key=lambda each: each[0])
    logger.info("%d tokens: %.1f us in both products with %s", num_tokens, time_us, best)
    return best


def _gate_up_calls(launcher: Launcher, group: Group, first: Step) -> Calls:
    def call(step: Step, inputs: LayerInputs) -> None:
        if step.block_m == 1:
            launcher.single_gate_up(inputs, step.gate_up)
        else:
            launcher.gate_up(inputs, step)

    return {tile: partial(call, replace(first, gate_up=tile)) for tile in group.gate_ups}


def _down_calls(launcher: Launcher, group: Group, first: Step, out: torch.Tensor) -> Calls:
    def call(step: Step, inputs: LayerInputs) -> None:
        if step.block_m == 1:
            launcher.single_down(inputs, step.down, out)
        else:
            launcher.down(inputs, step)

    return {tile: partial(call, replace(first, down=tile)) for tile in group.downs}


def _best(bench: LayerBench, sets: list[LayerInputs], calls: Calls) -> Timed | None:
    """Compile all tiles side by side, time those that work, return the quickest."""
    with ThreadPoolExecutor(
        _COMPILERS, initializer=_enter_device, initargs=(bench.device,)
    ) as pool:
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


def _enter_device(device: torch.device) -> None:
    """Give a thread the device's context, which describing a tensor needs before any launch."""
    torch.zeros(1, device=device)


def _can_run(call: Callable[[LayerInputs], object], inputs: LayerInputs) -> bool:
    try:
        call(inputs)
    except (OutOfResources, CompilationError, PTXASError) as error:
        logger.debug("left out: %s", error)
        return False
    return True
