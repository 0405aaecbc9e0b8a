"""Matrices as the copy engine of a device from compute capability 9.0 on knows them."""

from __future__ import annotations

import ctypes

from minisgl.errors import PluginError
from minisgl_kernels_cuda.units import MATRIX_MAP_BYTES, HeadsShape

# From cuda.h: CUtensorMap has to be aligned to 64 bytes; then values of its enumerations.
_ALIGNMENT = 64
_16_BITS = 1  # CU_TENSOR_MAP_DATA_TYPE_UINT16: what the elements mean does not matter to a copy
_NOT_INTERLEAVED, _SWIZZLED_128_BYTES, _READ_256_BYTES, _ZERO_OUTSIDE = 0, 3, 3, 0
_BOX_COLUMNS = 64  # 128 bytes


class MatrixMapper:
    """Makes maps by the driver, in one buffer: for one thread. A map takes about 2 µs."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Take the loaded driver, ``libcuda``."""
        self._library = library
        self._buffer = ctypes.create_string_buffer(MATRIX_MAP_BYTES + _ALIGNMENT)
        self._offset = -ctypes.addressof(self._buffer) % _ALIGNMENT
        self._map = ctypes.c_void_p(ctypes.addressof(self._buffer) + self._offset)
        self._flat, self._deep = _Form(2), _Form(3)

    def __call__(self, address: int, num_rows: int, num_columns: int, box_rows: int) -> bytes:
        """Return the map; see `minisgl_kernels_cuda.units.Loader.matrix_map`.

        Raises:
            PluginError: The driver refused, or is older than CUDA 12.
        """
        form = self._flat
        form.shape[:] = [num_columns, num_rows]
        form.strides[0] = 2 * num_columns
        form.box[1] = box_rows
        return self._encode(address, form)

    def heads(self, address: int, shape: HeadsShape, box: tuple[int, int]) -> bytes:
        """Return the map; see `minisgl_kernels_cuda.units.Loader.heads_map`.

        Raises:
            PluginError: As above.
        """
        form = self._deep
        form.shape[:] = [shape.head_dim, shape.num_heads, shape.num_tokens]
        form.strides[:] = [2 * shape.head_dim, 2 * shape.token_stride]
        form.box[1:] = [box[1], box[0]]
        return self._encode(address, form)

    def _encode(self, address: int, form: _Form) -> bytes:
        status = self._library.cuTensorMapEncodeTiled(
            self._map, _16_BITS, form.rank, ctypes.c_void_p(address), form.shape, form.strides,
            form.box, form.steps, _NOT_INTERLEAVED, _SWIZZLED_128_BYTES, _READ_256_BYTES,
            _ZERO_OUTSIDE,
        )  # fmt: skip
        if status:
            sizes = " x ".join(str(size) for size in reversed(form.shape))
            raise PluginError(
                f"a matrix of {sizes} elements at {address:#x} cannot be described to the device: "
                f"CUDA driver error {status}"
            )
        return self._buffer.raw[self._offset : self._offset + MATRIX_MAP_BYTES]


class _Form:
    """What the driver is told about a matrix; sizes begin with the contiguous one."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.shape = (ctypes.c_uint64 * rank)()
        self.strides = (ctypes.c_uint64 * (rank - 1))()
        self.box = (ctypes.c_uint32 * rank)(_BOX_COLUMNS)
        self.steps = (ctypes.c_uint32 * rank)(*[1] * rank)
