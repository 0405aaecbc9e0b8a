"""Quantised GGUF rows to float32.

The gguf package knows every type but works through 16 rows at a time. The types that small models
are shipped in get a faster way here, bit for bit the same: half the load time of the demo model
goes into this.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

_CHUNK_ROWS = 256  # keeps a chunk's temporaries in the cache, measured on widths of 576 to 1536
_BLOCK = 32  # elements that share a scale, in all three types below


def dequantize_rows(raw: np.ndarray, qtype: GGMLQuantizationType) -> np.ndarray:
    """Turn stored rows into numbers.

    Args:
        raw: ``[num_rows, row_bytes]`` uint8.
        qtype: How they are stored.

    Returns:
        ``[num_rows, width]`` float32.

    Raises:
        NotImplementedError: The installed gguf package does not know the type.
    """
    fast = _fast_way(qtype)
    if fast is None:
        return dequantize(raw, qtype)
    block, block_bytes = GGML_QUANT_SIZES[qtype]
    out = np.empty((raw.shape[0], raw.shape[1] // block_bytes * block), np.float32)
    for first in range(0, raw.shape[0], _CHUNK_ROWS):
        rows = slice(first, first + _CHUNK_ROWS)
        fast(raw[rows].reshape(-1, block_bytes), out[rows].reshape(-1, _BLOCK))
    return out


_Way = Callable[[np.ndarray, np.ndarray], None]


def _fast_way(qtype: GGMLQuantizationType) -> _Way | None:
    """Return a function of ``[num_blocks, block_bytes]`` uint8 that fills ``[num_blocks, 32]``."""
    if qtype == GGMLQuantizationType.Q8_0:
        return _q8_0
    if qtype == GGMLQuantizationType.Q4_0:
        return _q4_0
    if qtype == GGMLQuantizationType.Q4_1:
        return _q4_1
    return None


def _q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """Scale, then 32 signed bytes."""
    scale = _halves(blocks[:, :2])
    np.multiply(blocks[:, 2:].view(np.int8), scale, out=out, dtype=np.float32)


def _q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """Scale, then 16 bytes of two 4-bit numbers, 8 above their value: first half low, then high."""
    scale = _halves(blocks[:, :2])
    low, high = blocks[:, 2:] & 15, blocks[:, 2:] >> 4
    np.multiply(low.view(np.int8) - np.int8(8), scale, out=out[:, :16], dtype=np.float32)
    np.multiply(high.view(np.int8) - np.int8(8), scale, out=out[:, 16:], dtype=np.float32)


def _q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    """Scale and minimum, then 16 bytes of two 4-bit numbers."""
    numbers = _halves(blocks[:, :4])
    scale, minimum = numbers[:, :1], numbers[:, 1:]
    np.multiply(blocks[:, 4:] & 15, scale, out=out[:, :16], dtype=np.float32)
    np.multiply(blocks[:, 4:] >> 4, scale, out=out[:, 16:], dtype=np.float32)
    out += minimum


def _halves(raw: np.ndarray) -> np.ndarray:
    """Read float16 numbers as float32."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)
