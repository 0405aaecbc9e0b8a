"""Linear layers by our own C++ kernels, float32 on a CPU.

A weight is laid out anew in panels of outputs, which replaces the original; one of many more
outputs than inputs is a vocabulary. That is often shared with the embedding, so that another
layout would stand beside it, and it is read as it is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from minisgl.device import empty_parameter
from minisgl.native.library import load_unit
from minisgl.ops.contract import GatedActivation

# A weight of more outputs per input is a vocabulary.
MAX_OUTPUTS_PER_INPUT = 16

_ACTIVATIONS: tuple[GatedActivation, ...] = ("silu", "gelu", "gelu_tanh")
_Product = Callable[[int, int, int, int, int], None]


@dataclass(frozen=True, slots=True)
class LinearKernels:
    """The functions of the unit ``linear``; records and tensors are given by address.

    Attributes:
        packed_size: Floats of the panels of a weight.
        pack_weight: Lays out a weight: record, source, target.
        linear_packed: Product with panels: record, x, stride of x, out, rows.
        linear_dots: The same with a weight as it is.
    """

    packed_size: Callable[[int], int]
    pack_weight: Callable[[int, int, int], None]
    linear_packed: _Product
    linear_dots: _Product


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
    return LinearKernels(unit.packed_size, unit.pack_weight, unit.linear_packed, unit.linear_dots)


class NativeLinear:
    """A linear layer, its weight in panels or as it is, with or without a gated activation.

    A row's result depends on that row alone, whatever the number of rows and threads.

    Attributes:
        is_original_needed: Whether the weight is read as it is.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        is_packed: bool = True,
        activation: GatedActivation | None = None,
    ) -> None:
        """Lay out ``weight[out_features, in_features]``, or keep it.

        Args:
            weight: float32 on the CPU; with an activation, gate rows then up rows.
            bias: ``[out_features]``, or ``None``.
            is_packed: Whether to lay it out in panels, which an activation needs.
            activation: Of the gates, or ``None``.
        """
        kernels = load_kernels()
        num_rows, num_inputs = weight.shape
        kind = 0 if activation is None else 1 + _ACTIVATIONS.index(activation)
        self._num_outputs = num_rows // 2 if kind else num_rows
        self._num_inputs = num_inputs
        self.is_original_needed = not is_packed
        self._product = kernels.linear_packed if is_packed else kernels.linear_dots
        self._data = weight.contiguous()
        self._bias = None if bias is None else bias.contiguous()
        bias_address = None if self._bias is None else self._bias.data_ptr()
        self._record = _Weight(None, bias_address, self._num_outputs, num_inputs, kind)
        self._address = ctypes.addressof(self._record)
        if is_packed:
            size = kernels.packed_size(self._address)
            packed = empty_parameter((size,), weight.dtype, weight.device)
            kernels.pack_weight(self._address, self._data.data_ptr(), packed.data_ptr())
            self._data = packed
        self._record.data = self._data.data_ptr()

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
    is_vocabulary = num_outputs > MAX_OUTPUTS_PER_INPUT * num_inputs
    return NativeLinear(weight, bias, is_packed=not is_vocabulary)


def pack_gated_linear(
    weight: Tensor, bias: Tensor | None, activation: GatedActivation
) -> NativeLinear:
    """Lay out ``weight[2n, in_features]``, gate rows then up rows, for the product of both.

    Returns:
        A callable ``x[..., in_features] -> [..., n]``: ``act(x @ gate.T) * (x @ up.T)``.
    """
    return NativeLinear(weight, bias, activation=activation)
