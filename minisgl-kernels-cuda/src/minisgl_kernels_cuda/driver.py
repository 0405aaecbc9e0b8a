"""Kernels on a device: loading through cuda-core, launching through the driver itself.

A launch of ours costs the host about 2 µs; that of ``cuda.core`` takes 6.5 µs, most of it checks
of what is the same in every call. Arguments are packed into one buffer per kernel that the driver
copies during the call, so kernels are launched from one thread, as an engine does.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from typing import Any

import torch

from minisgl.errors import PluginError
from minisgl_kernels_cuda.compiler import Compiler
from minisgl_kernels_cuda.units import Launch, Loader, Unit, macro_of

# From cuda.h: CUlaunchAttribute and the markers of the "extra" list of a launch.
_ATTRIBUTE_BYTES = 72
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_END, _BUFFER_POINTER, _BUFFER_SIZE = 0, 1, 2
# CUlaunchConfig: grid, block, shared bytes; stream; then attributes and their number.
_SHAPE_AND_STREAM = struct.Struct("=7I4xQ")
_ATTRIBUTES = struct.Struct("=QI4x")


class DeviceLoader(Loader):
    """Loads units onto one device."""

    def __init__(self, device: torch.device, compiler: Compiler, has_pdl: bool) -> None:
        """Open the driver.

        Args:
            device: A CUDA device.
            compiler: For the device's architecture.
            has_pdl: Whether a kernel may start before the one in front of it has ended.
        """
        self._compiler = compiler
        self._device = device
        self._has_pdl = has_pdl
        self._library = ctypes.CDLL("libcuda.so.1")
        self._modules: list[object] = []  # the code is unloaded with the last reference

    def load(self, unit: Unit, dtype: torch.dtype) -> Mapping[str, Launch]:
        """Compile and load; see `Loader.load`."""
        # Heavy, and missing where the set is only discovered.
        from cuda.core import ObjectCode

        code = ObjectCode.from_cubin(self._compiler.cubin(unit, macro_of(dtype)), name=unit.name)
        self._modules.append(code)
        index = self._device.index
        stream_device = torch.cuda.current_device() if index is None else index
        return {
            name: DeviceLaunch(
                self._library, int(code.get_kernel(name).handle), name, layout,
                stream_device, self._has_pdl,
            )
            for name, layout in unit.entries.items()
        }


class DeviceLaunch:
    """Launches one kernel; see `Launch`."""

    def __init__(
        self,
        library: ctypes.CDLL,
        handle: int,
        name: str,
        layout: str,
        device_index: int,
        has_pdl: bool,
    ) -> None:
        """Prepare everything that is the same in every call."""
        self._name = name
        self._pack_arguments = struct.Struct(layout).pack_into
        self._arguments = ctypes.create_string_buffer(struct.calcsize(layout))
        self._num_bytes = ctypes.c_size_t(len(self._arguments))
        self._extra = (ctypes.c_void_p * 5)(
            _BUFFER_POINTER, ctypes.addressof(self._arguments),
            _BUFFER_SIZE, ctypes.addressof(self._num_bytes), _END,
        )  # fmt: skip
        self._attribute = ctypes.create_string_buffer(_ATTRIBUTE_BYTES)
        struct.pack_into("=I4xI", self._attribute, 0, _PROGRAMMATIC_STREAM_SERIALIZATION, 1)
        self._config = ctypes.create_string_buffer(_SHAPE_AND_STREAM.size + _ATTRIBUTES.size)
        _ATTRIBUTES.pack_into(
            self._config, _SHAPE_AND_STREAM.size, ctypes.addressof(self._attribute), int(has_pdl)
        )
        self._handle = ctypes.c_void_p(handle)
        self._call = library.cuLaunchKernelEx
        self._device_index = device_index
        # torch.cuda.current_stream() makes an object and costs more than the launch.
        self._stream_of: Any = torch._C._cuda_getCurrentRawStream  # torch has no stub for it

    def __call__(self, grid: tuple[int, int], block: tuple[int, int], *args: float) -> None:
        """Submit the kernel to torch's current stream.

        Raises:
            PluginError: The driver refused.
        """
        self._pack_arguments(self._arguments, 0, *args)
        stream = self._stream_of(self._device_index)
        _SHAPE_AND_STREAM.pack_into(
            self._config, 0, grid[0], grid[1], 1, block[0], block[1], 1, 0, stream
        )
        status = self._call(self._config, self._handle, None, self._extra)
        if status:
            raise PluginError(
                f"kernel {self._name}: launch of {grid} blocks of {block} threads failed with "
                f"CUDA driver error {status}"
            )
