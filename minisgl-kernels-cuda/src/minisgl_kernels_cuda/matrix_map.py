"""Matrices as the copy engine of a device from compute capability 9.0 on knows them."""

from __future__ import annotations

import ctypes

from minisgl.errors import PluginError
from minisgl_kernels_cuda.units import MATRIX_MAP_BYTES

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
        self._shape = (ctypes.c_uint64 * 2)()
        self._stride = (ctypes.c_uint64 * 1)()
        self._box = (ctypes.c_uint32 * 2)(_BOX_COLUMNS, 0)
        self._steps = (ctypes.c_uint32 * 2)(1, 1)

    def __call__(self, address: int, num_rows: int, num_columns: int, box_rows: int) -> bytes:
        """Return the map; see `minisgl_kernels_cuda.units.Loader.matrix_map`.

        Raises:
            PluginError: The driver refused, or is older than CUDA 12.
        """
        self._shape[:] = [num_columns, num_rows]
        self._stride[0] = 2 * num_columns
        self._box[1] = box_rows
        status = self._library.cuTensorMapEncodeTiled(
            self._map, _16_BITS, 2, ctypes.c_void_p(address), self._shape, self._stride, self._box,
            self._steps, _NOT_INTERLEAVED, _SWIZZLED_128_BYTES, _READ_256_BYTES, _ZERO_OUTSIDE,
        )  # fmt: skip
        if status:
            raise PluginError(
                f"a matrix of {num_rows} x {num_columns} elements at {address:#x} cannot be "
                f"described to the device: CUDA driver error {status}"
            )
        return self._buffer.raw[self._offset : self._offset + MATRIX_MAP_BYTES]
