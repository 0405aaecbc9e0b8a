"""Products with a weight, as ``pack_linear`` and ``pack_gated_linear``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.ops.contract import ActAndMul, GatedActivation, PackedLinear
from minisgl_kernels_cuda.linear_library import LibraryLinear
from minisgl_kernels_cuda.linear_many import ManyKernels, ManyLinear, serves_many
from minisgl_kernels_cuda.linear_plans import MAX_ROWS, FewPlan, Plan, kernel_rows
from minisgl_kernels_cuda.linear_table import choose, library_rows, many_rows, wide_rows
from minisgl_kernels_cuda.linear_wide import WideKernel, WideLinear
from minisgl_kernels_cuda.units import (
    LINEAR,
    LINEAR_BATCH,
    LINEAR_MANY,
    DeviceSize,
    Launch,
    Loader,
)

_FEW_THREADS = 256
_GROUP_THREADS = 128  # of 64 outputs of a batch
_BUCKET = 4  # rows that share a form
_COLUMN_ROWS = 8  # that an instruction of the kernels of few rows takes
_PIECE = 8  # elements that are read at once
_GATED_GROUPS = 2  # of a tile: gate and up
_NO_ACTIVATION = 0
_ACTIVATIONS: Mapping[GatedActivation, int] = {"silu": 1, "gelu": 2, "gelu_tanh": 3}


Run = Callable[[Tensor, Tensor, int], None]
"""Writes a product: takes the result, x and the number of rows of both."""


@dataclass(frozen=True, slots=True)
class Form:
    """A launch, all but its tensors.

    Attributes:
        launch: The kernel.
        grid: Blocks.
        block: Threads of a block.
        shared_bytes: Of a block.
        cluster: Blocks of a cluster.
        tail: Arguments behind rows, outputs, inputs and activation.
    """

    launch: Launch
    grid: tuple[int, int]
    block: tuple[int, int]
    shared_bytes: int
    cluster: int = 1
    tail: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Weight:
    """What is multiplied by.

    Attributes:
        weight: ``[n, k]``.
        bias: ``[n]``, or ``None``.
        activation: Of a gated product, which has ``n / 2`` outputs; or ``None``.
        act_and_mul: The same for the library's product.
    """

    weight: Tensor
    bias: Tensor | None
    activation: GatedActivation | None = None
    act_and_mul: ActAndMul | None = None


@dataclass(frozen=True, slots=True)
class LargeProduct:
    """A product of more rows than the kernels of batches take.

    Attributes:
        rows: For how many it is used.
        run: Writes it.
    """

    rows: range
    run: Run


class LinearKernels:
    """The kernels of one element type on one device; packs weights."""

    def __init__(
        self,
        loader: Loader,
        dtype: torch.dtype,
        device: DeviceSize,
        max_rows: int,
        activations: Mapping[str, ActAndMul],
        uses_many: bool = False,
    ) -> None:
        """Load the kernels.

        Args:
            loader: Where from.
            dtype: float16 or bfloat16.
            device: That they run on.
            max_rows: The user's limit, `CudaKernelSettings.linear_rows`.
            activations: The set's ops ``silu_and_mul`` and so on.
            uses_many: Whether the user wants those of more rows.
        """
        self._launches = dict(loader.load(LINEAR, dtype))
        if device.arch == LINEAR_BATCH.only_arch:
            self._launches |= loader.load(LINEAR_BATCH, dtype)
        has_many = uses_many and device.arch == LINEAR_MANY.only_arch
        self._many = ManyKernels(loader, dtype, device) if has_many else None
        self._wide = WideKernel(loader, dtype, device) if has_many else None
        self._dtype = dtype
        self._device = device
        self._max_rows = max_rows
        self._activations = activations

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """Return the product with ``weight``; see `minisgl.ops.contract.PackLinear`."""
        return CudaLinear(self, Weight(weight, bias))

    def pack_gated_linear(
        self, weight: Tensor, bias: Tensor | None, activation: GatedActivation
    ) -> PackedLinear:
        """Return the gated product; see `minisgl.ops.contract.PackGatedLinear`."""
        act_and_mul = self._activations[f"{activation}_and_mul"]
        return CudaLinear(self, Weight(weight, bias, activation, act_and_mul))

    def choose(self, n: int, k: int, rows: int) -> Plan | None:
        """Choose how ``rows`` are multiplied with a weight ``[n, k]``, ``None``: by the library."""
        return choose(n, k, rows, self._device)

    def many_rows(self, n: int, k: int, is_gated: bool) -> range:
        """Choose for how many rows the kernel of many takes a weight."""
        return many_rows(n, k, is_gated)

    def wide_rows(self, n: int, k: int) -> range:
        """Choose for how many rows the kernel of wide weights takes a gated one with SiLU."""
        return wide_rows(n, k, self._device)

    def library_rows(self, n: int, k: int) -> range:
        """Choose for how many rows cuBLASLt takes a weight."""
        return library_rows(n, k)

    def forms(self, of: Weight) -> list[Form | None]:
        """Return the form of each number of rows, in steps of 4: at ``i``, that of ``4 * i``."""
        if not self._is_served(of):
            return [None]
        buckets = range(_BUCKET, min(self._max_rows, MAX_ROWS) + 1, _BUCKET)
        return [None, *(self._form(of, rows) for rows in buckets)]

    def large(self, of: Weight) -> list[LargeProduct]:
        """Return the products of more rows that there are for a weight."""
        n, k = of.weight.shape
        is_gated, products = of.activation is not None, []
        if not self._is_served(of) or not serves_many(n, k, is_gated):
            return []
        if self._wide and of.activation == "silu" and (rows := self.wide_rows(n, k)):
            products.append(LargeProduct(rows, WideLinear(self._wide, of.weight, of.bias)))
        if self._many and (rows := self.many_rows(n, k, is_gated)):
            many = ManyLinear(self._many, of.weight, of.bias, of.activation)
            products.append(LargeProduct(rows, many))
        # With a bias PyTorch asks cuBLASLt anyway.
        is_plain = not is_gated and of.bias is None
        if self._many and is_plain and (rows := self.library_rows(n, k)):
            products.append(LargeProduct(rows, LibraryLinear(of.weight)))
        return products

    def _is_served(self, of: Weight) -> bool:
        """Whether kernels can read a weight 16 bytes at a time."""
        weight, bias = of.weight, of.bias
        is_aligned = weight.shape[1] % _PIECE == 0 and weight.data_ptr() % 16 == 0
        has_dtype = weight.dtype == self._dtype and (bias is None or bias.dtype == self._dtype)
        return is_aligned and has_dtype and weight.is_contiguous()

    def _form(self, of: Weight, rows: int) -> Form | None:
        """Return the launch of the plan for ``rows``."""
        n, k = of.weight.shape
        plan = self.choose(n, k, rows)
        if plan is None:
            return None
        if isinstance(plan, FewPlan):
            if of.activation and plan.groups != _GATED_GROUPS:
                return None
            launch = self._launches[f"linear_{plan.groups}_{-(-rows // _COLUMN_ROWS)}"]
            return Form(launch, (plan.num_blocks, 1), (_FEW_THREADS, 1), plan.shared_bytes(n, k))
        size = kernel_rows(rows)
        return Form(
            self._launches[f"linear_batch_{size}_{plan.groups}"],
            (plan.num_blocks(n), 1), (_GROUP_THREADS * plan.groups, 1), plan.shared_bytes(size),
            plan.splits, (plan.splits, plan.w_slots, plan.x_slots),
        )  # fmt: skip


class CudaLinear:
    """A weight that is read as it is, by our kernels or by the library, as the rows suggest.

    The kernels may read the weight before work that was submitted earlier has ended, so it must
    not be written by the kernel just in front of a product.

    Attributes:
        is_original_needed: True: the weight given to ``pack_linear`` is read.
    """

    is_original_needed = True

    def __init__(self, kernels: LinearKernels, of: Weight) -> None:
        """Plan the product for every number of rows."""
        self._of = of
        self._n, self._k = of.weight.shape
        self._num_outputs = self._n // 2 if of.activation else self._n
        self._activation = _NO_ACTIVATION if of.activation is None else _ACTIVATIONS[of.activation]
        self._forms = kernels.forms(of)
        self._max_rows = _BUCKET * (len(self._forms) - 1)
        self._large = kernels.large(of)

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``x[..., in_features] @ weight.T + bias``, gated or as it is, contiguous."""
        of = self._of
        num_rows = x.numel() // self._k
        run = self._choose(num_rows)
        if run is None or x.data_ptr() % 16 or x.dtype != of.weight.dtype:
            y = F.linear(x, of.weight, of.bias)
            return y if of.act_and_mul is None else of.act_and_mul(y)
        if not x.is_contiguous():
            x = x.contiguous()
        out = torch.empty((*x.shape[:-1], self._num_outputs), dtype=x.dtype, device=x.device)
        run(out, x, num_rows)
        return out

    def _choose(self, num_rows: int) -> Run | None:
        """Return what writes the product of so many rows, ``None``: the library."""
        form = self._forms[-(-num_rows // _BUCKET)] if num_rows <= self._max_rows else None
        if form is not None:
            return partial(self._launch, form)
        return next((each.run for each in self._large if num_rows in each.rows), None)

    def _launch(self, form: Form, out: Tensor, x: Tensor, num_rows: int) -> None:
        """Write the product of a few rows or of a batch."""
        of = self._of
        form.launch(
            form.grid, form.block, out.data_ptr(), x.data_ptr(), of.weight.data_ptr(),
            0 if of.bias is None else of.bias.data_ptr(), num_rows, self._n, self._k,
            self._activation, *form.tail, shared_bytes=form.shared_bytes, cluster=form.cluster,
        )  # fmt: skip
