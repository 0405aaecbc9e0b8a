"""Linear layers on a CPU in plain PyTorch, for machines where `native_linear` cannot be had.

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
============================= ===== ===== ===== ===== ====== ============================

So weights of few inputs are kept transposed. Weights of many inputs (1024 and more) are read at
full speed as they are, and so is one with more inputs than outputs. A vocabulary is often shared
with the embedding, so that another form would not replace it but stand beside it.
"""

from __future__ import annotations

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
# From this many inputs on, the transposed form gains nothing.
MIN_INPUTS_AS_THEY_ARE = 1024
# A weight of more outputs per input is a vocabulary.
MAX_OUTPUTS_PER_INPUT = 16


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


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> UnpackedLinear | TransposedLinear:
    """Choose the form of a linear layer; call it once per weight, after loading.

    Args:
        weight: ``[out_features, in_features]``, any dtype and device; special forms are for
            float32 on a CPU, all else goes to ``F.linear``. It must not change afterwards.
        bias: ``[out_features]`` in the dtype of ``weight``, or None.

    Returns:
        A callable ``x[..., in_features] -> [..., out_features]``. Where its
        ``is_original_needed`` is False, dropping ``weight`` leaves the memory as it was.
    """
    form = TransposedLinear if _is_better_transposed(weight) else UnpackedLinear
    return form(weight, bias)


def _is_better_transposed(weight: Tensor) -> bool:
    """Return whether another form than the weight as it is may be better."""
    num_outputs, num_inputs = weight.shape
    return (
        weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and num_inputs <= num_outputs
        and num_inputs < MIN_INPUTS_AS_THEY_ARE
        and num_outputs <= MAX_OUTPUTS_PER_INPUT * num_inputs
    )
