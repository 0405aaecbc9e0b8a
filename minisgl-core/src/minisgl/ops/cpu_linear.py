"""Linear layers on a CPU: the form of the product follows the weight and the number of rows.

A float32 product of few rows is bound by reading the weight, yet the library behind
``F.linear`` reads it at full speed for up to three rows only. Microseconds inside of decode steps
of the demo model on two Sapphire Rapids cores (``benchmarks/cpu_ops.py`` prints such tables):

============================= ===== ===== ===== ===== ====== ============================
3072 x 576, rows                 1     3     6    16    128   kept
============================= ===== ===== ===== ===== ====== ============================
``F.linear(x, w)``             363   415   732   767   2397   the weight alone
batch over blocks of outputs   391   485   500  1165      –   the weight alone
``(w @ x.T).T``                374   877   900  1052      –   the weight alone
``x @ wt``                     295   476   694   804   2399   a transposed copy *instead*
MKL's packed weight            344   430   522   554   1937   a packed copy *instead*
============================= ===== ===== ===== ===== ====== ============================

==================== ============================= =============================
rows                  960 x 576: 1, 3, 16, 128      576 x 576: 1, 3, 16, 128
==================== ============================= =============================
``F.linear(x, w)``    136, 154, 263, 804             80, 91, 154, 486
``x @ wt``            110, 155, 234, 799             73, 90, 126, 470
MKL's packed weight   173, 199, 246, 686             95, 115, 142, 435
==================== ============================= =============================

So small weights are kept transposed, and larger ones of few inputs in MKL's form. Weights
of many inputs (1024 and more) are read at full speed as they are, where MKL's form costs up to
15 % at one to three rows; so does that of a weight with more inputs than outputs. A vocabulary is
often shared with the embedding, so that another form would not replace it but stand beside it.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

# Most rows for which F.linear reads the weight at full speed.
MAX_PLAIN_ROWS = 3
# Most rows for the product in blocks, and outputs per block.
MAX_BLOCKED_ROWS = 12
BLOCK = 64
# The same for weights of so many outputs, of which a transposed result takes long to turn round:
# 49152 x 576 at 16 rows takes 12.7 ms in blocks, 15.8 ms transposed.
MIN_VOCABULARY = 16384
MAX_VOCABULARY_ROWS = 48
VOCABULARY_BLOCK = 256
# Most rows for the transposed product; above, all forms are bound by arithmetic.
MAX_TRANSPOSED_ROWS = 48
# From this many inputs on, MKL's packed form gains nothing.
MIN_INPUTS_UNPACKED = 1024
# A weight of more outputs per input is a vocabulary. That is often shared with the embedding,
# so that a packed form would not replace it but stand beside it.
MAX_OUTPUTS_PER_INPUT = 16
# Up to so many elements (4 MB), the transposed form is the best from 1 to 64 rows.
MAX_TRANSPOSED_SIZE = 1 << 20
# Row count at which MKL lays out its packed form; it is right for all others too. The layout for
# 128 rows is up to 20 % quicker than that for 64, both at 1 and at 128 rows.
_PACK_ROWS = 128


class UnpackedLinear:
    """A linear layer that reads the weight as it is.

    Attributes:
        is_original_needed: True: the weight given to ``pack_linear`` is read.
    """

    is_original_needed = True

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Keep ``weight[out_features, in_features]`` and ``bias[out_features]``."""
        self._weight, self._bias = weight, bias
        self._in_features = weight.shape[1]
        is_float32_cpu = weight.dtype == torch.float32 and weight.device.type == "cpu"
        # Other dtypes and devices have kernels of their own behind F.linear.
        self._max_special_rows = MAX_TRANSPOSED_ROWS if is_float32_cpu else 0
        is_vocabulary = weight.shape[0] >= MIN_VOCABULARY
        self._max_blocked_rows = MAX_VOCABULARY_ROWS if is_vocabulary else MAX_BLOCKED_ROWS
        self._blocks: Tensor | None = None
        block = VOCABULARY_BLOCK if is_vocabulary else BLOCK
        if is_float32_cpu and weight.shape[0] % block == 0 and weight.is_contiguous():
            self._blocks = weight.view(-1, block, weight.shape[1]).transpose(1, 2)

    @property
    def num_bytes(self) -> int:
        """Bytes that the layer keeps alive, the original weight included."""
        return self._weight.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``x[..., in_features] @ weight.T + bias``, contiguous."""
        num_rows = x.numel() // self._in_features
        if num_rows <= MAX_PLAIN_ROWS or num_rows > self._max_special_rows:
            return F.linear(x, self._weight, self._bias)
        rows = x.reshape(num_rows, self._in_features)
        if self._blocks is not None and num_rows <= self._max_blocked_rows:
            batch = rows.expand(self._blocks.shape[0], -1, -1)
            # [num_blocks, num_rows, outputs per block] to [num_rows, out_features]
            out = torch.bmm(batch, self._blocks).transpose(0, 1).reshape(num_rows, -1)
        else:
            out = torch.mm(self._weight, rows.t()).t().contiguous()
        if self._bias is not None:
            out.add_(self._bias)
        return out.view(*x.shape[:-1], out.shape[1])


class TransposedLinear:
    """A linear layer that keeps the weight as ``[in_features, out_features]``.

    Attributes:
        is_original_needed: False: the weight given to ``pack_linear`` was copied.
    """

    is_original_needed = False

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Copy ``weight[out_features, in_features]``."""
        self._weight = weight.t().contiguous()
        self._bias = bias

    @property
    def num_bytes(self) -> int:
        """Bytes that the layer keeps alive."""
        return self._weight.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``x[..., in_features] @ weight.T + bias``, contiguous."""
        if x.dim() != 2:
            out = self(x.reshape(-1, x.shape[-1]))
            return out.view(*x.shape[:-1], out.shape[1])
        if self._bias is not None:
            return torch.addmm(self._bias, x, self._weight)
        return torch.mm(x, self._weight)


class MklLinear:
    """A linear layer whose weight was laid out by MKL; the original may be dropped.

    Attributes:
        is_original_needed: False.
    """

    is_original_needed = False

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Pack ``weight[out_features, in_features]``, float32 on the CPU."""
        self._packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, _PACK_ROWS)
        self._bias = bias
        # The op takes sizes from the original weight and reads it only when told a row count
        # that differs from the actual one; one element stands for all.
        self._shape = torch.zeros(1).expand(weight.shape)
        self._in_features = weight.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight; MKL reserves more address space, which it never touches."""
        bias_bytes = 0 if self._bias is None else self._bias.nbytes
        return self._shape.numel() * self._shape.element_size() + bias_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``x[..., in_features] @ weight.T + bias``, contiguous."""
        num_rows = x.numel() // self._in_features
        out: Tensor = torch.ops.mkl._mkl_linear(x, self._packed, self._shape, self._bias, num_rows)
        return out


PackedForm = UnpackedLinear | TransposedLinear | MklLinear


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> PackedForm:
    """Choose the form of a linear layer; call it once per weight, after loading.

    Args:
        weight: ``[out_features, in_features]``, any dtype and device; special forms are for
            float32 on a CPU, all else goes to ``F.linear``. It must not change afterwards.
        bias: ``[out_features]`` in the dtype of ``weight``, or None.

    Returns:
        A callable ``x[..., in_features] -> [..., out_features]``. Where its
        ``is_original_needed`` is False, dropping ``weight`` leaves the memory as it was.
    """
    if not _is_replaceable(weight):
        return UnpackedLinear(weight, bias)
    if weight.numel() <= MAX_TRANSPOSED_SIZE:
        return TransposedLinear(weight, bias)
    if _can_pack(*weight.shape):
        return MklLinear(weight, bias)
    return UnpackedLinear(weight, bias)


def _is_replaceable(weight: Tensor) -> bool:
    """Return whether another form than the weight as it is may be better."""
    num_outputs, num_inputs = weight.shape
    return (
        weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and num_inputs <= num_outputs
        and num_inputs < MIN_INPUTS_UNPACKED
        and num_outputs <= MAX_OUTPUTS_PER_INPUT * num_inputs
    )


@lru_cache(maxsize=64)
def _can_pack(num_outputs: int, num_inputs: int) -> bool:
    """Try MKL's form once per shape, for row counts on both sides of the packing one.

    The op is undocumented, and MKL does not promise that a layout serves other row counts.
    """
    if not torch.backends.mkl.is_available() or not hasattr(torch.ops.mkl, "_mkl_linear"):
        return False
    weight = torch.linspace(-1, 1, num_outputs * num_inputs).view(num_outputs, num_inputs)
    x = torch.linspace(1, -2, (_PACK_ROWS + 1) * num_inputs).view(-1, num_inputs)
    packed = MklLinear(weight, None)
    for num_rows in (1, _PACK_ROWS + 1):
        expected = F.linear(x[:num_rows], weight)
        scale = float(expected.abs().max())
        if not torch.allclose(packed(x[:num_rows]), expected, rtol=1e-4, atol=1e-4 * scale):
            return False
    return True
