"""How attention is laid out on a device: what was measured to be best, and what fits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minisgl.errors import PluginError
from minisgl_kernels_cuda.units import DeviceSize

LOG2_E = math.log2(math.e)
"""On scores, for weights that are powers of 2."""
TILE_KEYS = 16
"""Keys that a warp takes in a step."""
GROUP = 8
"""Query heads that are served together."""
MAX_BLOCKS_PER_SM = 3
QUEUE_DEPTH = 2
"""Tiles in a warp's queue; ``DEPTH`` of ``attention.cu``."""
_MAX_WARPS_PER_SM = 12  # that the kernels' registers leave room for
_RESERVED_BYTES = 1024  # of a multiprocessor's shared memory, per block
_TABLE_BYTES = 12  # per request, behind the queue
# (Request, KV head) pairs per multiprocessor up to which one block is the best: a block has so
# little to read that what it costs to start one, and the room it takes from the kernels next to
# it, counts for more. Up to the first, blocks of eight warps read more keys at a time than four do;
# beyond it smaller chunks divide more evenly.
_EIGHT_WARPS_PAIRS, _ONE_BLOCK_PAIRS = 0.25, 0.5
_TWO_BLOCKS_PAIRS = 1.0  # up to which two are better than three
_MIN_WARPS = 4


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """One way to lay it out.

    Attributes:
        warps: Of a block: 4 or 8. A block's warps read `TILE_KEYS` keys each at a time.
        blocks_per_sm: Blocks per multiprocessor, as far as there is room.
        has_ends: Whether the end of a (request, KV head) counts as a chunk when work is divided.
            Merging the warps' sums takes about as long as one. Where blocks have few chunks, it
            should not count.
    """

    warps: int
    blocks_per_sm: int
    has_ends: bool = False

    @property
    def chunk_keys(self) -> int:
        """Keys that a block reads at a time."""
        return self.warps * TILE_KEYS

    def shared_bytes(self, num_reqs: int, key_bytes: int) -> int:
        """Return the shared memory of a block.

        Args:
            num_reqs: Rows of the batch.
            key_bytes: Of one key of one head.
        """
        queue = QUEUE_DEPTH * self.chunk_keys * 2 * key_bytes
        return queue + _TABLE_BYTES * num_reqs


def choose_plan(num_pairs: int, num_sms: int) -> AttentionPlan:
    """Return the best layout for a batch.

    Args:
        num_pairs: Requests times KV heads.
        num_sms: Multiprocessors.
    """
    if num_pairs <= _EIGHT_WARPS_PAIRS * num_sms:
        return AttentionPlan(warps=8, blocks_per_sm=1)
    if num_pairs <= _ONE_BLOCK_PAIRS * num_sms:
        return AttentionPlan(warps=4, blocks_per_sm=1)
    if num_pairs <= _TWO_BLOCKS_PAIRS * num_sms:
        return AttentionPlan(warps=4, blocks_per_sm=2)
    return AttentionPlan(warps=4, blocks_per_sm=3, has_ends=True)


def fit_plan(
    plan: AttentionPlan, num_reqs: int, key_bytes: int, device: DeviceSize
) -> AttentionPlan:
    """Return a plan, or one like it with as much shared memory as the device has.

    Raises:
        PluginError: The device has too little for any.
    """
    limit = device.max_shared_bytes + _RESERVED_BYTES

    def needed(plan: AttentionPlan) -> int:
        return plan.shared_bytes(num_reqs, key_bytes) + 2 * _RESERVED_BYTES

    while needed(plan) > limit:
        if plan.warps == _MIN_WARPS:
            raise PluginError(
                f"--attn cuda: keys of {key_bytes} bytes and {num_reqs} requests need "
                f"{needed(plan)} bytes of shared memory, this GPU has {limit}"
            )
        plan = replace(plan, warps=plan.warps // 2)
    most = min(limit // needed(plan), _MAX_WARPS_PER_SM // plan.warps, MAX_BLOCKS_PER_SM)
    return replace(plan, blocks_per_sm=min(plan.blocks_per_sm, most))


def aligned_queries(q: Tensor) -> Tensor:
    """Return queries whose heads follow each other and begin at 16 bytes: these, or a copy.

    Args:
        q: ``[num_tokens, num_qo_heads, head_dim]``.
    """
    is_dense = q.stride(2) == 1 and q.stride(1) == q.shape[2]
    is_aligned = q.stride(0) * q.element_size() % 16 == 0 and q.data_ptr() % 16 == 0
    return q if is_dense and is_aligned else q.clone(memory_format=torch.contiguous_format)
