"""Products of many rows, as of a prefill: how ``linear_many.cu`` is launched."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from minisgl.ops.contract import GatedActivation
from minisgl_kernels_cuda.units import LINEAR_MANY, DeviceSize, Loader

_THREADS = 384
_CLUSTER = 2  # blocks, which take tiles of the same outputs
_TILE_ROWS, _TILE_OUTPUTS = 128, 256  # rows of the weight: half of a gated tile's are gates
_BOX_ROWS, _RESULT_ROWS = 128, 64
_PIECE = 8  # elements of 16 bytes


class ManyKernels:
    """The kernels of one element type on one device."""

    def __init__(self, loader: Loader, dtype: torch.dtype, device: DeviceSize) -> None:
        """Load the kernels.

        Args:
            loader: Where from.
            dtype: float16 or bfloat16.
            device: That they run on; of the architecture of `LINEAR_MANY`.
        """
        launches = loader.load(LINEAR_MANY, dtype)
        self.matrix_map = loader.matrix_map
        self.launches = {
            activation: launches[f"linear_many_{activation or 'plain'}"]
            for activation in (None, *get_args(GatedActivation))
        }
        self.max_clusters = device.num_sms // _CLUSTER


def serves_many(n: int, k: int, is_gated: bool) -> bool:
    """Whether a weight ``[n, k]`` has rows of x and of the result that the engine can copy."""
    return k % _PIECE == 0 and n % (2 * _PIECE if is_gated else _PIECE) == 0


class ManyLinear:
    """The product of many rows with a weight that stays where it is."""

    def __init__(
        self,
        kernels: ManyKernels,
        weight: Tensor,
        bias: Tensor | None,
        activation: GatedActivation | None,
    ) -> None:
        """Describe the weight to the device.

        Args:
            kernels: Of its dtype and device.
            weight: ``[n, k]``, contiguous, at a multiple of 16 bytes; see `serves_many`.
            bias: ``[n]``, or ``None``.
            activation: Of a gated product.
        """
        self._n, self._k = weight.shape
        self._num_outputs = self._n // 2 if activation else self._n
        self._num_columns = -(-self._n // _TILE_OUTPUTS)
        self._launch = kernels.launches[activation]
        self._matrix_map = kernels.matrix_map
        self._max_clusters = kernels.max_clusters
        self._weight_map = self._matrix_map(weight.data_ptr(), self._n, self._k, _BOX_ROWS)
        self._bias = 0 if bias is None else bias.data_ptr()

    def __call__(self, out: Tensor, x: Tensor, num_rows: int) -> None:
        """Write the product.

        Args:
            out: ``[..., outputs]``, contiguous, at a multiple of 16 bytes.
            x: ``[..., k]``, likewise.
            num_rows: Of both, at least 1.
        """
        num_tiles = -(-num_rows // (_CLUSTER * _TILE_ROWS)) * self._num_columns
        self._launch(
            (_CLUSTER * min(num_tiles, self._max_clusters), 1), (_THREADS, 1),
            self._matrix_map(x.data_ptr(), num_rows, self._k, _BOX_ROWS), self._weight_map,
            self._matrix_map(out.data_ptr(), num_rows, self._num_outputs, _RESULT_ROWS),
            self._bias, num_rows, self._n, self._k,
            shared_bytes=LINEAR_MANY.max_shared_bytes, cluster=_CLUSTER,
        )  # fmt: skip
