"""All-reduce of small messages by kernels of our own, over `PeerMemory`.

What a small message costs is decided by latency: an exchange between GPUs takes three microseconds,
and NCCL's kernels twice that. See the README for the figures.
"""

from __future__ import annotations

import copy
import struct
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from minisgl_kernels_cuda.units import ALLREDUCE, Launch, Loader, piece_size

MAX_RANKS = 8
NUM_RANKS = (2, 4, 8)
"""Sizes of groups that there are kernels for."""

# As in sources/peers.cuh.
_TILES_AT = 8192
_MAX_BLOCKS = 128
_TILE = 1024
_PIECE_BYTES = 16
_PER_THREAD = 2
_SHARED_BLOCK = 2 << 20

_WARP = 32
_MAX_THREADS = 512
_FEW_PIECES = 128  # a block with fewer to send gains nothing from there being more blocks


class Limits(NamedTuple):
    """Which kernel serves a message.

    Attributes:
        at_once_bytes: Largest message that each rank sends whole to all others.
        by_parts_bytes: Largest message, above that, that each rank sums a part of; beyond it is
            NCCL.
    """

    at_once_bytes: int
    by_parts_bytes: int


# By the number of ranks. Two were measured on H200s, see the README: both ways send as much, so the
# one with one exchange wins until it is a matter of bandwidth, and NCCL nowhere up to 8 MB. For
# four and eight it is reckoned from what each way sends, and from the time of an exchange.
DEFAULT_LIMITS = {
    2: Limits(3 << 20, 8 << 20),
    4: Limits(256 << 10, 4 << 20),
    8: Limits(128 << 10, 2 << 20),
}


@dataclass(frozen=True, slots=True)
class PeerGroup:
    """What the kernels work on.

    Attributes:
        rank: This rank.
        addresses: Of every rank's memory, in this process; each at least `memory_bytes` of zeros
            at first.
        verdict: Address of two int32 in pinned host memory, zeros at first: the host sets the first
            to end all waiting, the kernels the second when they have waited in vain.
        timeout_s: How long a kernel waits for another rank.
    """

    rank: int
    addresses: tuple[int, ...]
    verdict: int
    timeout_s: float


def memory_bytes(num_ranks: int) -> int:
    """Return how much memory each rank needs, in whole blocks of what the driver shares."""
    num_bytes = _TILES_AT + _MAX_BLOCKS * 2 * num_ranks * _TILE * _PIECE_BYTES
    return -(-num_bytes // _SHARED_BLOCK) * _SHARED_BLOCK


class PeerReduce:
    """The kernels of one element type. All ranks make the same calls in the same order."""

    def __init__(
        self, loader: Loader, dtype: torch.dtype, group: PeerGroup, limits: Limits
    ) -> None:
        """Load the kernels.

        Args:
            loader: Where they come from.
            dtype: Of the messages.
            group: The memory.
            limits: Which kernel serves which size.
        """
        num_ranks = len(group.addresses)
        assert num_ranks in NUM_RANKS, f"there are kernels for {NUM_RANKS} ranks"
        launches = loader.load(ALLREDUCE, dtype)
        self._at_once: Launch = launches[f"sum_at_once_{num_ranks}"]
        self._by_parts: Launch = launches[f"sum_by_parts_{num_ranks}"]
        self._add_norm: Launch = launches[f"sum_add_norm_{num_ranks}"]
        self._num_ranks = num_ranks
        self._rank = group.rank
        self._dtype = dtype
        self._piece = piece_size(dtype)
        self._limits = limits
        places = (*group.addresses, *[0] * (MAX_RANKS - num_ranks))
        self._peers = struct.pack(f"{MAX_RANKS}P", *places)
        self._verdict = group.verdict
        self._patience = self._pack_patience(group.timeout_s)

    def with_timeout(self, timeout_s: float) -> PeerReduce:
        """Return the same kernels, which wait so long for another rank."""
        other = copy.copy(self)
        other._patience = self._pack_patience(timeout_s)
        return other

    def _pack_patience(self, timeout_s: float) -> bytes:
        return struct.pack("Pq", self._verdict, int(timeout_s * 1e9))

    def all_reduce(self, x: Tensor) -> bool:
        """Sum a tensor over ranks in place.

        Returns:
            Whether it was done; if not, it is too large, or no whole number of 16-byte pieces.
        """
        num_bytes = x.numel() * x.element_size()
        if num_bytes > self._limits.by_parts_bytes or not self._is_dense(x) or not num_bytes:
            return False
        num_pieces, rest = divmod(num_bytes, _PIECE_BYTES)
        if rest:
            return False
        if num_bytes <= self._limits.at_once_bytes:
            self.sum_at_once(x, num_pieces)
        else:
            self.sum_by_parts(x, num_pieces)
        return True

    def sum_at_once(self, x: Tensor, num_pieces: int) -> None:
        """Sum in one exchange; see `all_reduce`, which knows when."""
        self._sum(self._at_once, x, num_pieces, 1)

    def sum_by_parts(self, x: Tensor, num_pieces: int) -> None:
        """Sum in two exchanges; see `all_reduce`, which knows when."""
        self._sum(self._by_parts, x, num_pieces, self._num_ranks)

    def all_reduce_add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """Sum, add and norm in place; see `minisgl.distributed.contract.AllReduceAddNorm`."""
        n = x.shape[-1]
        num_rows = x.numel() // n
        num_pieces, rest = divmod(n, self._piece)
        if rest or num_pieces > _TILE or not num_rows:
            return None
        if x.numel() * x.element_size() > self._limits.at_once_bytes:
            return None
        if not (self._is_dense(x) and self._is_dense(residual) and self._is_dense(weight)):
            return None
        per_thread = 1 if num_pieces <= _MAX_THREADS else _PER_THREAD
        block = (_whole_warps(-(-num_pieces // per_thread)), 1)
        self._add_norm(
            (min(num_rows, _MAX_BLOCKS), 1), block, self._peers, self._patience,
            x.data_ptr(), residual.data_ptr(), weight.data_ptr(), self._rank, num_rows, n, eps,
        )  # fmt: skip
        return x, residual

    def _sum(self, launch: Launch, x: Tensor, num_pieces: int, num_parts: int) -> None:
        """Launch either kernel: a block takes ``num_parts`` tiles at a time."""
        num_blocks = max(1, min(_MAX_BLOCKS, num_pieces // (_FEW_PIECES * num_parts)))
        tile = min(_TILE, -(-num_pieces // (num_blocks * num_parts)))
        block = (min(_MAX_THREADS, _whole_warps(tile)), 1)
        # Rounding up the tile may leave blocks with nothing, and each has to have something.
        num_blocks = min(num_blocks, -(-num_pieces // (tile * num_parts)))
        launch(
            (num_blocks, 1), block, self._peers, self._patience,
            x.data_ptr(), num_pieces, tile, self._rank,
        )  # fmt: skip

    def _is_dense(self, x: Tensor) -> bool:
        return x.dtype == self._dtype and x.is_contiguous() and x.data_ptr() % _PIECE_BYTES == 0


def _whole_warps(num_threads: int) -> int:
    return _WARP * -(-num_threads // _WARP)
