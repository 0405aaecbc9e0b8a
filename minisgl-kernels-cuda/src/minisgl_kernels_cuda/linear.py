"""Products of few rows with a weight, as ``pack_linear``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.ops.contract import PackedLinear
from minisgl_kernels_cuda.units import LINEAR, Launch, Loader

_THREADS = 256
_SHOT_INPUTS = 1024  # that the warps of a block read in one go
_GROUP = 8  # outputs, and rows of x, of half an mma
COLUMNS = (1, 2, 4)
"""Groups of 8 rows that the kernels are made for."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How one product is run.

    Attributes:
        groups: Of 8 outputs in a tile, 1 or 2.
        is_shot: Whether a block makes one tile with all its inputs asked for at once.
        num_blocks: Of the launch.
    """

    groups: int
    is_shot: bool
    num_blocks: int


class LinearKernels:
    """The kernels of one element type on one device; packs weights."""

    def __init__(
        self, loader: Loader, dtype: torch.dtype, num_sms: int, max_rows: int
    ) -> None:
        """Load the kernels.

        Args:
            loader: Where from.
            dtype: float16 or bfloat16.
            num_sms: Multiprocessors of the device.
            max_rows: The user's limit, `CudaKernelSettings.linear_rows`.
        """
        self.launches: Mapping[str, Launch] = loader.load(LINEAR, dtype)
        self.dtype = dtype
        self._num_sms = num_sms
        self._max_rows = max_rows

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """Return the product with ``weight``; see `minisgl.ops.contract.PackLinear`."""
        return CudaLinear(self, weight, bias, self._row_limit(weight, bias))

    def plan(self, n: int, k: int, columns: int) -> Plan:
        """Choose the form for a weight ``[n, k]`` and up to ``8 * columns`` rows."""
        # Small tiles keep every multiprocessor busy where there are few outputs.
        groups = 1 if n < 2 * _GROUP * self._num_sms and columns < 4 else 2
        num_tiles = -(-n // (_GROUP * groups))
        if k <= _SHOT_INPUTS and num_tiles <= 8 * self._num_sms:
            return Plan(groups, True, num_tiles)
        # A few tiles too many for all to be resident cost less than an uneven share of them.
        return Plan(groups, False, num_tiles if num_tiles <= 4 * self._num_sms
                    else 2 * self._num_sms)

    def _row_limit(self, weight: Tensor, bias: Tensor | None) -> int:
        """Return up to how many rows the kernels serve a weight better than the library."""
        is_served = weight.dtype == self.dtype and weight.is_contiguous()
        is_aligned = weight.shape[1] % 8 == 0 and weight.data_ptr() % 16 == 0
        if not is_served or not is_aligned or (bias is not None and bias.dtype != self.dtype):
            return 0
        return min(self._max_rows, _GROUP * COLUMNS[-1])


class CudaLinear:
    """A weight that is read as it is, by our kernels for few rows and by the library for many.

    The kernels may read the weight before work that was submitted earlier has ended, so it must
    not be written by the kernel just in front of a product.

    Attributes:
        is_original_needed: True: the weight given to ``pack_linear`` is read.
    """

    is_original_needed = True

    def __init__(
        self, kernels: LinearKernels, weight: Tensor, bias: Tensor | None, max_rows: int
    ) -> None:
        """Plan every number of rows up to ``max_rows``."""
        self._weight, self._bias = weight, bias
        self._n, self._k = weight.shape
        self._max_rows = max_rows
        self._plans: dict[int, tuple[Launch, tuple[int, int]]] = {}
        for columns in COLUMNS:
            plan = kernels.plan(self._n, self._k, columns)
            form = "shot" if plan.is_shot else "stream"
            launch = kernels.launches[f"linear_{form}_{plan.groups}_{columns}"]
            self._plans[columns] = launch, (plan.num_blocks, 1)

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``x[..., in_features] @ weight.T + bias``, contiguous."""
        num_rows = x.numel() // self._k
        if not 0 < num_rows <= self._max_rows or x.data_ptr() % 16 or x.dtype != self._weight.dtype:
            return F.linear(x, self._weight, self._bias)
        if not x.is_contiguous():
            x = x.contiguous()
        columns = 1 if num_rows <= 8 else 2 if num_rows <= 16 else 4
        launch, grid = self._plans[columns]
        out = torch.empty((*x.shape[:-1], self._n), dtype=x.dtype, device=x.device)
        bias = self._bias
        launch(
            grid, (_THREADS, 1), out.data_ptr(), x.data_ptr(), self._weight.data_ptr(),
            0 if bias is None else bias.data_ptr(), num_rows, self._n, self._k,
        )  # fmt: skip
        return out
