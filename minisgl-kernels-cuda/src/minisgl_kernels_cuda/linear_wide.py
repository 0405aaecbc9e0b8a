"""Gated products of large decode batches: how ``linear_wide.cu`` is launched."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from minisgl_kernels_cuda.units import LINEAR_WIDE, DeviceSize, Loader

_CLUSTER = 2  # blocks, which take neighbouring tiles and copy half of x each
_TILE_GATES = 72
_BARRIERS = 128  # bytes
_LINE = 128  # bytes of a row in a step


class WideForm(NamedTuple):
    """One of the kernels; as `Form` in ``linear_wide.cu``.

    Attributes:
        rows: Most rows that it is for.
        groups: Warpgroups that multiply; another one copies.
        stages: Of the ring.
    """

    rows: int
    groups: int
    stages: int

    @property
    def threads(self) -> int:
        """Of a block."""
        return 128 * (self.groups + 1)

    @property
    def shared_bytes(self) -> int:
        """Of a block."""
        return self.stages * (self.rows + 2 * _TILE_GATES) * _LINE + _BARRIERS


FORMS = (WideForm(128, 2, 6), WideForm(192, 3, 5), WideForm(256, 2, 4))
WIDE_ROWS = FORMS[-1].rows
"""Most rows that there is a kernel for."""


def evenness(n: int, num_sms: int) -> float:
    """Return which part of the device's multiprocessors the tiles of a gated weight keep busy.

    Args:
        n: Rows of the weight, gates and ups.
        num_sms: Of the device.
    """
    num_pairs, num_clusters = -(-n // 2 // (_CLUSTER * _TILE_GATES)), num_sms // _CLUSTER
    return num_pairs / (-(-num_pairs // num_clusters) * num_clusters)


class WideKernels:
    """The kernels of one element type on one device."""

    def __init__(self, loader: Loader, dtype: torch.dtype, device: DeviceSize) -> None:
        """Load the kernels.

        Args:
            loader: Where from.
            dtype: float16 or bfloat16.
            device: That they run on; of the architecture of `LINEAR_WIDE`.
        """
        launches = loader.load(LINEAR_WIDE, dtype)
        self.matrix_map = loader.matrix_map
        self.forms = [(form, launches[f"linear_wide_{form.rows}"]) for form in FORMS]
        self.max_clusters = device.num_sms // _CLUSTER


class WideLinear:
    """The product of a batch with the gates and ups of a weight that stays where it is, and SiLU.

    As with the kernels of few rows, the weight is read while the work in front may still run.
    """

    def __init__(self, kernels: WideKernels, weight: Tensor, bias: Tensor | None) -> None:
        """Describe the weight to the device.

        Args:
            kernels: Of its dtype and device.
            weight: ``[n, k]``, contiguous, at a multiple of 16 bytes; `serves_many`.
            bias: ``[n]``, or ``None``.
        """
        self._n, self._k = weight.shape
        self._forms = kernels.forms
        self._matrix_map = kernels.matrix_map
        num_pairs = -(-self._n // 2 // (_CLUSTER * _TILE_GATES))
        self._num_blocks = _CLUSTER * min(num_pairs, kernels.max_clusters)
        self._weight_map = self._matrix_map(weight.data_ptr(), self._n, self._k, _TILE_GATES)
        self._bias = 0 if bias is None else bias.data_ptr()

    def __call__(self, out: Tensor, x: Tensor, num_rows: int) -> None:
        """Write the product.

        Args:
            out: ``[..., n / 2]``, contiguous, at a multiple of 16 bytes.
            x: ``[..., k]``, likewise.
            num_rows: Of both, from 1 to `WIDE_ROWS`.
        """
        form, launch = next(each for each in self._forms if num_rows <= each[0].rows)
        launch(
            (self._num_blocks, 1), (form.threads, 1),
            self._matrix_map(x.data_ptr(), num_rows, self._k, form.rows // _CLUSTER),
            self._weight_map, out.data_ptr(), self._bias, num_rows, self._n, self._k,
            shared_bytes=form.shared_bytes, cluster=_CLUSTER,
        )  # fmt: skip
