"""Gated products of large decode batches: how ``linear_wide.cu`` is launched."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl_kernels_cuda.units import LINEAR_WIDE, DeviceSize, Loader

MAX_WIDE_ROWS = 192
"""Most rows that the kernel takes."""

_CLUSTER = 2  # blocks, which take neighbouring tiles and copy half of x each
_THREADS = 512
_TILE_GATES = 72


def evenness(n: int, num_sms: int) -> float:
    """Return which part of the device's multiprocessors the tiles of a gated weight keep busy.

    Args:
        n: Rows of the weight, gates and ups.
        num_sms: Of the device.
    """
    num_pairs, num_clusters = _num_pairs(n), num_sms // _CLUSTER
    return num_pairs / (-(-num_pairs // num_clusters) * num_clusters)


def _num_pairs(n: int) -> int:
    """Return the pairs of tiles of a weight of so many gates and ups."""
    return -(-n // 2 // (_CLUSTER * _TILE_GATES))


class WideKernel:
    """The kernel of one element type on one device."""

    def __init__(self, loader: Loader, dtype: torch.dtype, device: DeviceSize) -> None:
        """Load the kernel.

        Args:
            loader: Where from.
            dtype: float16 or bfloat16.
            device: That it runs on; of the architecture of `LINEAR_WIDE`.
        """
        self.launch = loader.load(LINEAR_WIDE, dtype)["linear_wide"]
        self.matrix_map = loader.matrix_map
        self.max_clusters = device.num_sms // _CLUSTER


class WideLinear:
    """The product of a batch with the gates and ups of a weight that stays where it is, and SiLU.

    As with the kernels of few rows, the weight is read while the work in front may still run.
    """

    def __init__(self, kernel: WideKernel, weight: Tensor, bias: Tensor | None) -> None:
        """Describe the weight to the device.

        Args:
            kernel: Of its dtype and device.
            weight: ``[n, k]``, contiguous, at a multiple of 16 bytes; see `serves_many`.
            bias: ``[n]``, or ``None``.
        """
        self._n, self._k = weight.shape
        self._launch = kernel.launch
        self._matrix_map = kernel.matrix_map
        self._num_blocks = _CLUSTER * min(_num_pairs(self._n), kernel.max_clusters)
        self._weight_map = self._matrix_map(weight.data_ptr(), self._n, self._k, _TILE_GATES)
        self._bias = 0 if bias is None else bias.data_ptr()

    def __call__(self, out: Tensor, x: Tensor, num_rows: int) -> None:
        """Write the product.

        Args:
            out: ``[..., n / 2]``, contiguous, at a multiple of 16 bytes.
            x: ``[..., k]``, likewise.
            num_rows: Of both, from 1 to `MAX_WIDE_ROWS`.
        """
        assert num_rows <= MAX_WIDE_ROWS, "a tile has all rows"
        self._launch(
            (self._num_blocks, 1), (_THREADS, 1),
            self._matrix_map(x.data_ptr(), num_rows, self._k, MAX_WIDE_ROWS // _CLUSTER),
            self._weight_map, out.data_ptr(), self._bias, num_rows, self._n, self._k,
            shared_bytes=LINEAR_WIDE.max_shared_bytes, cluster=_CLUSTER,
        )  # fmt: skip
