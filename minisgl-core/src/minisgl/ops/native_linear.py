"""Linear layers by our own C++ kernels, float32 on a CPU.

A weight is laid out anew, which replaces the original: in tiles for the matrix unit, where the CPU
has one (AMX) and the numbers are sums of at most two bfloat16, else in panels of outputs. One of
many more outputs than inputs is a vocabulary. That is often shared with the embedding, so that
another layout would stand beside it, and it is read as it is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from minisgl.device import empty_parameter
from minisgl.native.library import load_unit
from minisgl.ops.contract import GatedActivation

# A weight of more outputs per input is a vocabulary.
MAX_OUTPUTS_PER_INPUT = 16

_ACTIVATIONS: tuple[GatedActivation, ...] = ("silu", "gelu", "gelu_tanh")
# Terms of bfloat16 that a weight in tiles may have.
MAX_TERMS = 2

_Product = Callable[[int, int, int, int, int], None]

LinearForm = Literal["best", "panels", "dots", "tiles"]


@dataclass(frozen=True, slots=True)
class TileKernels:
    """The functions of the unit ``linear`` that need the matrix unit.

    Attributes:
        terms_needed: Terms of bfloat16 that make up a weight, up to one more than `MAX_TERMS`:
            record, source.
        tiles_size: Floats of the tiles of a weight: record, terms.
        pack_tiles: Lays out a weight: record, terms, source, target.
        linear_tiles: Product with a weight in tiles, by its number of terms less 1.
    """

    terms_needed: Callable[[int, int], int]
    tiles_size: Callable[[int, int], int]
    pack_tiles: Callable[[int, int, int, int], None]
    linear_tiles: tuple[_Product, _Product]


@dataclass(frozen=True, slots=True)
class LinearKernels:
    """The functions of the unit ``linear``; records and tensors are given by address.

    Attributes:
        packed_size: Floats of the panels of a weight.
        pack_weight: Lays out a weight: record, source, target.
        linear_packed: Product with panels: record, x, stride of x, out, rows.
        linear_dots: The same with a weight as it is.
        tiles: What is for the matrix unit, or ``None`` where it cannot be used.
    """

    packed_size: Callable[[int], int]
    pack_weight: Callable[[int, int, int], None]
    linear_packed: _Product
    linear_dots: _Product
    tiles: TileKernels | None


class _Weight(ctypes.Structure):
    """``struct Weight`` of the unit."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_outputs", ctypes.c_int64),
        ("num_inputs", ctypes.c_int64),
        ("activation", ctypes.c_int64),
    )


@lru_cache(maxsize=1)
def load_kernels() -> LinearKernels:
    """Load the unit, compiling it if need be.

    Raises:
        CompileError: It cannot be had on this machine.
    """
    unit = load_unit("linear")
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    unit.packed_size.argtypes, unit.packed_size.restype = (pointer,), count
    unit.pack_weight.argtypes, unit.pack_weight.restype = (pointer, pointer, pointer), None
    for product in (unit.linear_packed, unit.linear_dots):
        product.argtypes, product.restype = (pointer, pointer, count, pointer, count), None
    return LinearKernels(
        unit.packed_size,
        unit.pack_weight,
        unit.linear_packed,
        unit.linear_dots,
        _load_tiles(unit),
    )


def _load_tiles(unit: ctypes.CDLL) -> TileKernels | None:
    if not unit.has_tiles():
        return None
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    unit.terms_needed.argtypes, unit.terms_needed.restype = (pointer, pointer), count
    unit.tiles_size.argtypes, unit.tiles_size.restype = (pointer, count), count
    unit.pack_tiles.argtypes, unit.pack_tiles.restype = (pointer, count, pointer, pointer), None
    products = (unit.linear_one_term, unit.linear_two_terms)
    for product in products:
        product.argtypes, product.restype = (pointer, pointer, count, pointer, count), None
    return TileKernels(unit.terms_needed, unit.tiles_size, unit.pack_tiles, products)


class NativeLinear:
    """A linear layer in one of the forms, with or without a gated activation.

    A row's result depends on that row alone, whatever the number of rows and threads.

    Attributes:
        is_original_needed: Whether the weight is read as it is.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        form: LinearForm = "panels",
        activation: GatedActivation | None = None,
    ) -> None:
        """Lay out ``weight[out_features, in_features]``, or keep it.

        Args:
            weight: float32 on the CPU; with an activation, gate rows then up rows.
            bias: ``[out_features]``, or ``None``.
            form: ``panels`` and ``tiles`` lay it out, ``best`` in tiles if they can be had, else in
                panels; ``dots`` keeps it and takes no activation.
            activation: Of the gates, or ``None``.

        Raises:
            ValueError: It cannot be kept in tiles, see `fits_tiles`.
        """
        kernels = load_kernels()
        num_rows, num_inputs = weight.shape
        kind = 0 if activation is None else 1 + _ACTIVATIONS.index(activation)
        self._num_outputs = num_rows // 2 if kind else num_rows
        self._num_inputs = num_inputs
        self.is_original_needed = form == "dots"
        self._data = weight.contiguous()
        self._bias = None if bias is None else bias.contiguous()
        bias_address = None if self._bias is None else self._bias.data_ptr()
        self._record = _Weight(None, bias_address, self._num_outputs, num_inputs, kind)
        self._address = ctypes.addressof(self._record)
        in_tiles = self._pack_tiles(kernels.tiles) if form in ("best", "tiles") else None
        if in_tiles is not None:
            self._product = in_tiles
        elif form == "tiles":
            raise ValueError(
                "form tiles: needs a matrix unit, and a weight that is a sum of "
                f"{MAX_TERMS} bfloat16"
            )
        elif form == "dots":
            self._product = kernels.linear_dots
        else:
            self._product = kernels.linear_packed
            self._pack(kernels.packed_size(self._address), kernels.pack_weight)
        self._record.data = self._data.data_ptr()

    def _pack_tiles(self, kernels: TileKernels | None) -> _Product | None:
        """Lay it out in tiles, or return ``None`` where they cannot be had."""
        if kernels is None:
            return None
        # It reads the whole weight, so whoever does not know yet whether it fits asks here alone.
        terms = kernels.terms_needed(self._address, self._data.data_ptr())
        if terms > MAX_TERMS:
            return None
        size = kernels.tiles_size(self._address, terms)
        self._pack(size, lambda record, *data: kernels.pack_tiles(record, terms, *data))
        return kernels.linear_tiles[terms - 1]

    def _pack(self, size: int, pack: Callable[[int, int, int], None]) -> None:
        packed = empty_parameter((size,), self._data.dtype, self._data.device)
        pack(self._address, self._data.data_ptr(), packed.data_ptr())
        self._data = packed

    @property
    def num_bytes(self) -> int:
        """Bytes that the layer keeps alive."""
        return self._data.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute ``x[..., in_features]`` to ``[..., out_features]``, contiguous."""
        if x.dim() != 2:
            out = self(x.reshape(-1, x.shape[-1]))
            return out.view(*x.shape[:-1], self._num_outputs)
        num_rows = x.shape[0]
        out = torch.empty(num_rows, self._num_outputs)
        if num_rows:
            row_stride, stride = x.stride()
            if stride != 1:
                x, row_stride = x.contiguous(), self._num_inputs
            self._product(self._address, x.data_ptr(), row_stride, out.data_ptr(), num_rows)
        return out


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> NativeLinear:
    """Choose the layout of a linear layer; call it once per weight, after loading.

    Args:
        weight: ``[out_features, in_features]`` float32 on the CPU. It must not change afterwards.
        bias: ``[out_features]`` float32, or None.

    Returns:
        A callable ``x[..., in_features] -> [..., out_features]``. Where its
        ``is_original_needed`` is False, dropping ``weight`` leaves the memory as it was.
    """
    num_outputs, num_inputs = weight.shape
    if num_outputs > MAX_OUTPUTS_PER_INPUT * num_inputs:
        return NativeLinear(weight, bias, "dots")
    return NativeLinear(weight, bias, "best")


def pack_gated_linear(
    weight: Tensor, bias: Tensor | None, activation: GatedActivation
) -> NativeLinear:
    """Choose the layout of ``weight[2n, in_features]``, gate rows then up rows.

    Returns:
        A callable ``x[..., in_features] -> [..., n]``: ``act(x @ gate.T) * (x @ up.T)``.
    """
    return NativeLinear(weight, bias, "best", activation)


def fits_tiles(weight: Tensor) -> bool:
    """Return whether ``weight[out_features, in_features]`` can be kept in tiles.

    The machine must have a matrix unit that the system lets us use, and each number be a sum of two
    bfloat16: so is all that was stored in 16 bits, and most of what was quantised.
    """
    kernels = load_kernels().tiles
    if kernels is None:
        return False
    data = weight.contiguous()
    record = _Weight(None, None, *data.shape, 0)
    return kernels.terms_needed(ctypes.addressof(record), data.data_ptr()) <= MAX_TERMS
