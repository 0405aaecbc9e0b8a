"""Which form of a product is the quickest for a weight and a number of rows.

Measured on an H200 (``benchmarks/gpu_linear.py``; bf16, microseconds in a replayed graph, the
weight from memory); few rows:

================ ====== ====== ====== ====== ====== ======
outputs x inputs 1 row  cuBLAS 8 rows cuBLAS 16     cuBLAS
================ ====== ====== ====== ====== ====== ======
4096 x 1024      3.28   5.24   3.69   5.24   4.13   5.27
1024 x 2048      2.43   12.63  2.73   5.81   3.43   5.81
6144 x 1024      3.87   5.85   4.26   5.88   5.32   5.89
1024 x 3072      3.12   7.40   3.78   7.44   4.48   7.64
151936 x 1024    71.7   77.8   77.0   80.0   87.0   81.5
7168 x 5120      20.0   22.9   21.7   23.2   27.8   20.7
5120 x 5120      13.9   15.4   15.2   15.6   20.8   15.8
34816 x 5120     89.0   87.7   92.5   88.5   114    89.1
5120 x 17408     47.5   49.6   50.1   52.0   63.5   52.1
151936 x 5120    373    371    394    374    485    376
================ ====== ====== ====== ====== ====== ======

Few outputs want large tiles on few multiprocessors all the same: what counts there is how soon a
block has read x, not how many read the weight. In a chain of dependent kernels the queue of each
product is filled while the kernel in front still runs, which is worth another 30 %.
"""

from __future__ import annotations

from minisgl_kernels_cuda.linear_plans import (
    FEW_ROWS,
    MAX_SPLITS,
    BatchPlan,
    FewPlan,
    Plan,
    kernel_rows,
)
from minisgl_kernels_cuda.units import LINEAR_BATCH, STATIC_SHARED_BYTES, DeviceSize

# Elements of a weight up to which 16 rows, and up to which 8, beat the library.
_SMALL = 8 << 20
_LARGE = 100_000_000
# Above, small tiles in many blocks keep more of a weight on its way.
_MEDIUM = 64_000_000
_STEP_INPUTS = 1024  # of linear.cu
_FULL_DEPTH_BYTES = 128 * 1024  # of its largest queue
# Elements of a weight from which a tile of the batch kernel is 128 outputs.
_WIDE_TILES = 1 << 25
_BLOCKS_PER_SM = 3


def choose(n: int, k: int, rows: int, device: DeviceSize) -> Plan | None:
    """Return the form for a weight ``[n, k]``, or ``None`` where the library is quicker.

    Args:
        n: Outputs.
        k: Inputs, a multiple of 8.
        rows: Most rows that the form is for, a multiple of 8.
        device: That it runs on.
    """
    if rows <= FEW_ROWS[-1] or device.arch != LINEAR_BATCH.only_arch:
        return _few_rows(n, k, rows, device)
    return batch_rule(n, k, rows, device)


def _few_rows(n: int, k: int, rows: int, device: DeviceSize) -> FewPlan | None:
    """Return the form of up to 16 rows, if it is quicker."""
    # A weight with many times more tiles of one step than the device has room for.
    is_wide = k <= _STEP_INPUTS and n > 2 * 8 * 3 * device.num_sms
    is_small = n * k <= _SMALL
    if rows > FEW_ROWS[-1 if is_small else 0] or (n * k > _LARGE and not is_wide):
        return None
    num_small, num_tiles = -(-n // 8), -(-n // 16)
    if is_wide:
        # Blocks that come and go are quicker than ones that stay and take the next tile.
        return FewPlan(1, num_small)
    if k <= _STEP_INPUTS:
        return FewPlan(2, min(num_tiles, 2 * device.num_sms))
    if n * k > _MEDIUM or device.max_shared_bytes - STATIC_SHARED_BYTES < _FULL_DEPTH_BYTES:
        return FewPlan(1, min(num_small, 4 * device.num_sms))
    return FewPlan(2, min(num_tiles, device.num_sms))


def batch_rule(n: int, k: int, rows: int, device: DeviceSize) -> BatchPlan:
    """Return a form that fits any weight: enough blocks, and rings that fill their memory."""
    groups = 1 if n * k <= _WIDE_TILES else 2
    alone = BatchPlan(groups, 1, 2, 2)
    most = min(_BLOCKS_PER_SM * device.num_sms // alone.num_blocks(n), alone.num_steps(k))
    splits = max(s for s in (1, 2, 4, MAX_SPLITS) if s <= max(most, 1))
    blocks = -(-alone.num_blocks(n) * splits // device.num_sms)
    return fill(groups, splits, min(blocks, _BLOCKS_PER_SM), (k, kernel_rows(rows)), device)


def fill(
    groups: int, splits: int, blocks_per_sm: int, size: tuple[int, int], device: DeviceSize,
    x_slots: int = 3,
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
    while plan.w_slots > 2 and plan.shared_bytes(rows) > room:
        plan = BatchPlan(groups, splits, plan.w_slots - 1, plan.x_slots)
    return plan
