"""The forms that our products of few rows and of batches come in, and the memory they take."""

from __future__ import annotations

from dataclasses import dataclass

FEW_ROWS = (8, 16)
"""Rows that the kernels of ``linear.cu`` are made for."""

BATCH_KERNELS = ((16, 1), (16, 2), (32, 1), (64, 1), (96, 1), (128, 1))
"""Rows and groups that ``linear_batch.cu`` is made for: those that won somewhere on an H200."""

MAX_ROWS = BATCH_KERNELS[-1][0]

MAX_SPLITS = 8
"""Blocks of a cluster that every device with clusters allows."""

_PIECE = 8  # elements of 16 bytes
# linear.cu
_FEW_STEP_INPUTS = 1024  # that the warps of a block read in a step
_FEW_STEP_BYTES = 16 * 1024  # of a step, per group of outputs
_FEW_DEPTH = 4  # steps that are on their way
# linear_batch.cu
_GROUP_OUTPUTS = 64
_STEP_INPUTS, _STEP_BYTES = 128, 256  # of an output or a row
_SUM_BYTES, _SUM_PADDING = 4, 4


@dataclass(frozen=True, slots=True)
class FewPlan:
    """How ``linear.cu`` runs a product.

    Attributes:
        groups: Of 8 outputs in a tile, 1 or 2.
        num_blocks: Of the launch; each takes every ``num_blocks``-th tile.
    """

    groups: int
    num_blocks: int

    def shared_bytes(self, n: int, k: int) -> int:
        """Return the size of the queue for a weight ``[n, k]``."""
        num_tiles = -(-n // (_PIECE * self.groups))
        num_steps = -(-num_tiles // self.num_blocks) * -(-k // _FEW_STEP_INPUTS)
        return min(num_steps, _FEW_DEPTH) * self.groups * _FEW_STEP_BYTES


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How ``linear_batch.cu`` runs a product.

    Attributes:
        groups: Of 64 outputs in a tile, 1 or 2; a warpgroup each.
        splits: Blocks that share the inputs of a tile: 1, 2, 4 or 8.
        w_slots: Steps of the weight that are on their way or in use; at least 2, or every step.
        x_slots: The same of x.
    """

    groups: int
    splits: int
    w_slots: int
    x_slots: int

    @property
    def tile_outputs(self) -> int:
        """Outputs of a tile; half of them are of the gate in a gated product."""
        return _GROUP_OUTPUTS * self.groups

    def num_steps(self, k: int) -> int:
        """Return the most steps that a block takes."""
        all_steps = -(-k // _STEP_INPUTS)
        return -(-all_steps // self.splits)

    def num_blocks(self, n: int) -> int:
        """Return the blocks of the launch for a weight ``[n, k]``, a gated one with an even n."""
        return -(-n // self.tile_outputs) * self.splits

    def shared_bytes(self, rows: int) -> int:
        """Return what a block of the kernel for ``rows`` takes."""
        rings = (self.w_slots * self.tile_outputs + self.x_slots * rows) * _STEP_BYTES
        sums = rows * (self.tile_outputs + _SUM_PADDING) * _SUM_BYTES
        return max(rings, sums)


Plan = FewPlan | BatchPlan


def has_kernel(plan: Plan, rows: int) -> bool:
    """Whether a plan can run with ``rows``, at most `MAX_ROWS`."""
    if isinstance(plan, FewPlan):
        return rows <= FEW_ROWS[-1]
    return (kernel_rows(rows), plan.groups) in BATCH_KERNELS


def kernel_rows(rows: int) -> int:
    """Return the size of the batch kernel that serves ``rows``, at most `MAX_ROWS`."""
    return next(size for size, _ in BATCH_KERNELS if size >= rows)
