"""Which form of a product is the quickest for a weight and a number of rows.

What an H200 measured is in ``benchmarks/results/2026-11-30-products-h200.md``. `_MEASURED` holds
the weights of Qwen3-0.6B and 14B, tuned inside a decode layer, where products overlap with the
small kernels beside them; other weights go by a rule that chooses nearly the same for those.

Few outputs want large tiles on few multiprocessors all the same: what counts there is how soon a
block has read x, not how many read the weight. In a chain of dependent kernels the queue of each
product is filled while the kernel in front still runs, which is worth another 30 %.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace

from minisgl_kernels_cuda.linear_plans import (
    FEW_ROWS,
    MAX_ROWS,
    MAX_SPLITS,
    BatchPlan,
    FewPlan,
    Plan,
    kernel_rows,
)
from minisgl_kernels_cuda.linear_wide import MAX_WIDE_ROWS, evenness
from minisgl_kernels_cuda.units import LINEAR_BATCH, STATIC_SHARED_BYTES, DeviceSize

# Plans by outputs and inputs, each with the most rows it is for; beyond the last is the library,
# as it is where it was not at least 2 % slower.
_MEASURED: Mapping[tuple[int, int], tuple[tuple[int, Plan | None], ...]] = {
    (4096, 1024): (  # q, k and v of 0.6B
        (4, FewPlan(1, 512)), (8, FewPlan(2, 256)), (32, BatchPlan(1, 2, 4, 4)),
        (64, BatchPlan(1, 4, 2, 2)),
    ),
    (1024, 2048): (  # o
        (4, FewPlan(2, 64)), (8, None), (16, BatchPlan(1, 8, 2, 2)),
    ),
    (6144, 1024): (  # gate and up
        (8, FewPlan(2, 384)), (32, BatchPlan(1, 2, 4, 4)), (64, BatchPlan(1, 2, 3, 4)),
    ),
    (1024, 3072): (  # down
        (4, FewPlan(2, 64)), (64, BatchPlan(1, 8, 3, 3)), (128, BatchPlan(1, 8, 3, 2)),
    ),
    (151_936, 1024): ((4, BatchPlan(1, 1, 3, 4)), (16, BatchPlan(2, 1, 2, 2))),  # head
    (7168, 5120): (  # q, k and v of 14B
        (4, BatchPlan(1, 2, 6, 4)), (16, BatchPlan(2, 2, 5, 4)), (32, BatchPlan(1, 2, 5, 4)),
    ),
    (5120, 5120): ((4, BatchPlan(1, 4, 3, 4)),),  # o
    (34_816, 5120): ((4, BatchPlan(1, 1, 6, 4)), (16, BatchPlan(1, 1, 3, 4))),  # gate and up
    (5120, 17_408): ((16, BatchPlan(2, 8, 2, 2)), (32, BatchPlan(1, 4, 3, 2))),  # down
    (151_936, 5120): (  # head
        (8, BatchPlan(1, 1, 3, 4)), (16, BatchPlan(2, 1, 2, 2)), (32, BatchPlan(1, 1, 5, 4)),
    ),
}  # fmt: skip

# Elements of a weight up to which the library is slower by what it costs to start.
_SMALL = 8 << 20
# The kernels of few rows, without those of batches: elements above which the library is quicker,
_LARGE = 100_000_000
# and above which small tiles in many blocks keep more of a weight on its way.
_MEDIUM = 64_000_000
_FEW_STEP_INPUTS = 1024  # of linear.cu
_FULL_DEPTH_BYTES = 128 * 1024  # of its largest queue
# The kernels of batches.
_WEIGHT_ROWS, _SMALL_ROWS = 32, 64  # up to which weights with few outputs, and small ones, win
_DEEP = 3  # inputs per output from which a small weight wins with any rows
_BLOCKS_PER_SM = 3
_MIN_STEPS = 4  # that make a ring worth its start
_MIN_W_SLOTS = 3
# The kernel of many rows: from how many rows on, with weights of how many inputs, and plain ones
# also of how many outputs, it is no slower than the library (benchmarks.gpu_linear --many). A gated
# product gains a quarter with 1024 inputs and 5 % with 5120; a plain one gains nothing in bursts,
# and 2 % where the GPU is held back by its power.
_MANY_GATED_ROWS, _MANY_GATED_INPUTS = 2048, 1024
_MANY_PLAIN_ROWS, _MANY_PLAIN_SIZE = 4096, 4096
# The kernel of wide weights: for those that take longer to read than a launch takes, and whose
# tiles leave few multiprocessors without work. It computes 192 rows whatever there are of them, so
# that 160 gain 2 to 6 % and 192 a fifth. Kernels like it of 128 and 256 rows were too close to the
# library to be kept.
_MIN_WIDE_ROWS, _WIDE_INPUTS, _WIDE_SIZE, _WIDE_EVENNESS = 160, 1024, 32 << 20, 0.85
# cuBLASLt instead of cuBLAS: for long weights, with batches that are no longer few and not yet as
# much to multiply as to read. It takes 0.86 to 0.93 of the time with 33 to 128 rows of 14B's down
# (5120 outputs) and 0.87 to 0.92 with 48 to 96 of 4096 outputs, but 1.04 to 1.09 with 128 of these;
# with 136 rows of 14B's it is slower, and with other weights they are alike.
_MIN_LIBRARY_ROWS, _MIN_LIBRARY_OUTPUTS, _MIN_LIBRARY_DEPTH = 33, 4096, 3
_MAX_LIBRARY_ROWS, _MORE_LIBRARY_ROWS, _MORE_LIBRARY_OUTPUTS = 96, 128, 5120


def choose(n: int, k: int, rows: int, device: DeviceSize) -> Plan | None:
    """Return the form for a weight ``[n, k]``, or ``None`` where the library is quicker.

    Args:
        n: Outputs.
        k: Inputs, a multiple of 8.
        rows: Most rows that the form is for, from 1 to `MAX_ROWS`.
        device: That it runs on.
    """
    if device.arch != LINEAR_BATCH.only_arch:
        return few_rule(n, k, rows, device)
    if (n, k) in _MEASURED:
        return next((plan for most, plan in _MEASURED[n, k] if rows <= most), None)
    if n * k <= _SMALL and rows <= FEW_ROWS[0]:
        return few_rule(n, k, rows, device)
    return batch_rule(n, k, rows, device) if rows <= _most_rows(n, k) else None


def many_rows(n: int, k: int, is_gated: bool) -> range:
    """Return for how many rows the kernel of many takes a weight ``[n, k]``.

    Args:
        n: Outputs.
        k: Inputs.
        is_gated: Whether it is of gate and up, with the activation behind it.
    """
    if is_gated:
        return _from(_MANY_GATED_ROWS) if k >= _MANY_GATED_INPUTS else range(0)
    return _from(_MANY_PLAIN_ROWS) if min(n, k) >= _MANY_PLAIN_SIZE else range(0)


def _from(rows: int) -> range:
    """Return all numbers of rows from one on."""
    return range(rows, sys.maxsize)


def wide_rows(n: int, k: int, device: DeviceSize) -> range:
    """Return for how many rows the kernel of wide weights takes a gated one ``[n, k]``.

    Args:
        n: Gates and ups.
        k: Inputs.
        device: That it runs on.
    """
    is_large = k >= _WIDE_INPUTS and n * k >= _WIDE_SIZE
    is_taken = is_large and evenness(n, device.num_sms) >= _WIDE_EVENNESS
    return range(_MIN_WIDE_ROWS, MAX_WIDE_ROWS + 1) if is_taken else range(0)


def library_rows(n: int, k: int) -> range:
    """Return for how many rows cuBLASLt takes a weight ``[n, k]``, if no kernel of ours does.

    Args:
        n: Outputs.
        k: Inputs.
    """
    if n < _MIN_LIBRARY_OUTPUTS or k < _MIN_LIBRARY_DEPTH * n:
        return range(0)
    most = _MORE_LIBRARY_ROWS if n >= _MORE_LIBRARY_OUTPUTS else _MAX_LIBRARY_ROWS
    return range(_MIN_LIBRARY_ROWS, most + 1)


def few_rule(n: int, k: int, rows: int, device: DeviceSize) -> FewPlan | None:
    """Return the form of up to 16 rows by the kernels of any device, if it is quicker."""
    # A weight with many times more tiles of one step than the device has room for.
    is_wide = k <= _FEW_STEP_INPUTS and n > 2 * 8 * 3 * device.num_sms
    is_small = n * k <= _SMALL
    if rows > FEW_ROWS[-1 if is_small else 0] or (n * k > _LARGE and not is_wide):
        return None
    num_small, num_tiles = -(-n // 8), -(-n // 16)
    if is_wide:
        # Blocks that come and go are quicker than ones that stay and take the next tile.
        return FewPlan(1, num_small)
    if k <= _FEW_STEP_INPUTS:
        return FewPlan(2, min(num_tiles, 2 * device.num_sms))
    if n * k > _MEDIUM or device.max_shared_bytes - STATIC_SHARED_BYTES < _FULL_DEPTH_BYTES:
        return FewPlan(1, min(num_small, 4 * device.num_sms))
    return FewPlan(2, min(num_tiles, device.num_sms))


def _most_rows(n: int, k: int) -> int:
    """Return up to how many rows the kernels of batches are quicker.

    Each tile reads all rows again, so that many rows want few outputs, and the library's larger
    tiles win with all others as soon as reading the weight does not hide it.
    """
    if n * k <= _SMALL:
        return MAX_ROWS if k >= _DEEP * n else _SMALL_ROWS
    return _WEIGHT_ROWS if 2 * n <= 3 * k else FEW_ROWS[-1]


def batch_rule(n: int, k: int, rows: int, device: DeviceSize) -> BatchPlan:
    """Return a form that fits any weight: enough blocks, and rings that fill their memory."""
    alone = BatchPlan(1, 1, 2, 2)
    num_tiles, num_steps = alone.num_blocks(n), alone.num_steps(k)
    most = min(_BLOCKS_PER_SM * device.num_sms // num_tiles, num_steps)
    splits = max(s for s in (1, 2, 4, MAX_SPLITS) if s <= max(most, 1))
    # Long rings in fewer blocks, if these still are about one for each multiprocessor.
    while (
        splits > 1
        and num_steps < _MIN_STEPS * splits
        and num_tiles * splits // 2 > 0.9 * device.num_sms
    ):
        splits //= 2
    blocks_per_sm = min(-(-num_tiles * splits // device.num_sms), _BLOCKS_PER_SM)
    # Large clusters do not fill every group of multiprocessors with one block on each.
    blocks_per_sm = max(blocks_per_sm, 2 if splits == MAX_SPLITS else 1)
    return fill(1, splits, blocks_per_sm, (k, kernel_rows(rows)), device)


def fill(
    groups: int, splits: int, blocks_per_sm: int, size: tuple[int, int], device: DeviceSize,
    x_slots: int = 4,
) -> BatchPlan:  # fmt: skip
    """Return the form whose rings are as long as so many blocks on a multiprocessor allow.

    Args:
        groups: See `BatchPlan`.
        splits: See `BatchPlan`.
        blocks_per_sm: That are to fit beside each other.
        size: Inputs of the weight and rows of the kernel.
        device: That it runs on.
        x_slots: Most steps of x.
    """
    k, rows = size
    room = min(
        (device.max_shared_bytes + 1024) // blocks_per_sm - 1024,
        device.max_shared_bytes - STATIC_SHARED_BYTES,
    )
    num_steps = BatchPlan(groups, splits, 2, 2).num_steps(k)
    plan = BatchPlan(groups, splits, num_steps, min(num_steps, x_slots))
    while plan.shared_bytes(rows) > room:
        if plan.w_slots > _MIN_W_SLOTS or (plan.x_slots <= 2 < plan.w_slots):
            plan = replace(plan, w_slots=plan.w_slots - 1)
        elif plan.x_slots > 2:
            plan = replace(plan, x_slots=plan.x_slots - 1)
        else:
            break
    return plan
