"""Products of few rows with a weight, as ``pack_linear``.

The forms and limits below were measured on an H200 (``benchmarks/gpu_kernels.py --tune``; bf16,
microseconds in a replayed graph, the weight from memory):

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

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.ops.contract import PackedLinear
from minisgl_kernels_cuda.units import (
    LINEAR,
    STATIC_SHARED_BYTES,
    DeviceSize,
    Launch,
    Loader,
)

_THREADS = 256
_STEP_INPUTS = 1024  # that the warps of a block read in a step
_DEPTH = 4  # steps that are on their way
_STEP_BYTES = 16 * 1024  # of a step, per group of outputs
_GROUP = 8  # outputs, and rows of x, of half an mma
# Elements of a weight up to which 16 rows, and up to which 8, beat the library.
_SMALL = 8 << 20
_LARGE = 100_000_000
# Above, small tiles in many blocks keep more of a weight on its way.
_MEDIUM = 64_000_000
COLUMNS = (1, 2)
"""Groups of 8 rows that the kernels are made for."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How one product is run.

    Attributes:
        groups: Of 8 outputs in a tile, 1 or 2.
        num_blocks: Of the launch; each takes every ``num_blocks``-th tile.
    """

    groups: int
    num_blocks: int

    def shared_bytes(self, n: int, k: int) -> int:
        """Return the size of the queue for a weight ``[n, k]``."""
        num_tiles = -(-n // (_GROUP * self.groups))
        num_steps = -(-num_tiles // self.num_blocks) * -(-k // _STEP_INPUTS)
        return min(num_steps, _DEPTH) * self.groups * _STEP_BYTES


class LinearKernels:
    """The kernels of one element type on one device; packs weights."""

    def __init__(
        self, loader: Loader, dtype: torch.dtype, device: DeviceSize, max_rows: int
    ) -> None:
        """Load the kernels.

        Args:
            loader: Where from.
            dtype: float16 or bfloat16.
            device: That they run on.
            max_rows: The user's limit, `CudaKernelSettings.linear_rows`.
        """
        self.launches: Mapping[str, Launch] = loader.load(LINEAR, dtype)
        self.dtype = dtype
        self._num_sms = device.num_sms
        self._max_shared_bytes = device.max_shared_bytes - STATIC_SHARED_BYTES
        self._max_rows = max_rows

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """Return the product with ``weight``; see `minisgl.ops.contract.PackLinear`."""
        return CudaLinear(self, weight, bias, self.row_limit(weight, bias))

    def plan(self, n: int, k: int) -> Plan:
        """Choose the form for a weight ``[n, k]``."""
        num_small, num_tiles = -(-n // _GROUP), -(-n // (2 * _GROUP))
        if self._is_wide(n, k):
            # Blocks that come and go are quicker than ones that stay and take the next tile.
            return Plan(1, num_small)
        if k <= _STEP_INPUTS:
            return Plan(2, min(num_tiles, 2 * self._num_sms))
        if n * k > _MEDIUM or self._max_shared_bytes < 2 * _DEPTH * _STEP_BYTES:
            return Plan(1, min(num_small, 4 * self._num_sms))
        return Plan(2, min(num_tiles, self._num_sms))

    def row_limit(self, weight: Tensor, bias: Tensor | None) -> int:
        """Return up to how many rows the kernels serve a weight better than the library."""
        n, k = weight.shape
        is_served = weight.dtype == self.dtype and weight.is_contiguous()
        is_aligned = k % 8 == 0 and weight.data_ptr() % 16 == 0
        if not is_served or not is_aligned or (bias is not None and bias.dtype != self.dtype):
            return 0
        if n * k > _LARGE and not self._is_wide(n, k):
            return 0
        is_small = n * k <= _SMALL
        return min(self._max_rows, _GROUP * COLUMNS[-1 if is_small else 0])

    def _is_wide(self, n: int, k: int) -> bool:
        """Whether a weight has many times more tiles than the device has room for, of one step."""
        return k <= _STEP_INPUTS and n > 2 * _GROUP * 3 * self._num_sms


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
        """Plan the product."""
        self._weight, self._bias = weight, bias
        self._n, self._k = weight.shape
        self._max_rows = max_rows
        plan = kernels.plan(self._n, self._k)
        self._grid = plan.num_blocks, 1
        self._shared_bytes = plan.shared_bytes(self._n, self._k)
        self._launches = {c: kernels.launches[f"linear_{plan.groups}_{c}"] for c in COLUMNS}

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``x[..., in_features] @ weight.T + bias``, contiguous."""
        num_rows = x.numel() // self._k
        if not 0 < num_rows <= self._max_rows or x.data_ptr() % 16 or x.dtype != self._weight.dtype:
            return F.linear(x, self._weight, self._bias)
        if not x.is_contiguous():
            x = x.contiguous()
        launch = self._launches[1 if num_rows <= _GROUP else 2]
        out = torch.empty((*x.shape[:-1], self._n), dtype=x.dtype, device=x.device)
        bias = self._bias
        launch(
            self._grid, (_THREADS, 1), out.data_ptr(), x.data_ptr(), self._weight.data_ptr(),
            0 if bias is None else bias.data_ptr(), num_rows, self._n, self._k,
            shared_bytes=self._shared_bytes,
        )  # fmt: skip
        return out
