"""Kernels on a device: loading through cuda-core, launching through the driver itself.

A launch of ours costs the host about 2 µs; that of ``cuda.core`` takes 6.5 µs, most of it checks
of what is the same in every call. Arguments are packed into one buffer per kernel that the driver
copies during the call, so kernels are launched from one thread, as an engine does.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Mapping
from typing import Any

import torch

from minisgl.errors import PluginError
from minisgl_kernels_cuda.compiler import Compiler
from minisgl_kernels_cuda.matrix_map import MatrixMapper
from minisgl_kernels_cuda.units import (
    DeviceSize,
    HeadsShape,
    Launch,
    Loader,
    Unit,
    macro_of,
)

# From cuda.h: CUlaunchAttribute.
_ATTRIBUTE_BYTES = 72
_CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6
_MAX_DYNAMIC_SHARED_BYTES = 8  # CUfunction_attribute
_DEFAULT_SHARED_BYTES = 48 * 1024
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
        self._map_matrix = MatrixMapper(self._library)
        self._modules: list[object] = []  # the code is unloaded with the last reference

    def load(self, unit: Unit, dtype: torch.dtype) -> Mapping[str, Launch]:
        """Compile and load; see `Loader.load`."""
        # Heavy, and missing where the set is only discovered.
        from cuda.core import ObjectCode  # noqa: PLC0415

        code = ObjectCode.from_cubin(self._compiler.cubin(unit, macro_of(dtype)), name=unit.name)
        self._modules.append(code)
        index = self._device.index
        device = torch.cuda.current_device() if index is None else index
        launches = {}
        for name, layout in unit.entries.items():
            handle = int(code.get_kernel(name).handle)
            self._allow_shared(handle, unit, device)
            launches[name] = DeviceLaunch(
                self._library, handle, name, layout, device, self._has_pdl
            )
        return launches

    def matrix_map(self, address: int, num_rows: int, num_columns: int, box_rows: int) -> bytes:
        """Describe a matrix; see `Loader.matrix_map`."""
        return self._map_matrix(address, num_rows, num_columns, box_rows)

    def heads_map(self, address: int, shape: HeadsShape, box: tuple[int, int]) -> bytes:
        """Describe heads of tokens; see `Loader.heads_map`."""
        return self._map_matrix.heads(address, shape, box)

    def _allow_shared(self, handle: int, unit: Unit, device: int) -> None:
        """Raise a kernel's limit of shared memory, as far as this device has it."""
        most = device_size(device).max_shared_bytes - unit.static_shared_bytes
        limit = min(unit.max_shared_bytes, most)
        if limit <= _DEFAULT_SHARED_BYTES:
            return
        status = self._library.cuKernelSetAttribute(
            _MAX_DYNAMIC_SHARED_BYTES, limit, ctypes.c_void_p(handle), device
        )
        if status:
            raise PluginError(
                f"--kernels cuda: {limit} bytes of shared memory are refused with CUDA driver "
                f"error {status}"
            )


def device_size(device: torch.device | int) -> DeviceSize:
    """Return what plans depend on, of a CUDA device."""
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks a field
    sm = properties.major * 10 + properties.minor
    # Code for 9.0 runs on no later device, so that it may as well use what only that one has.
    return DeviceSize(
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,
        "sm_90a" if sm == 90 else f"sm_{sm}",
    )


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
        at, offsets = ctypes.addressof(self._arguments), argument_offsets(layout)
        # One by one: the driver knows best how it aligns them.
        self._addresses = (ctypes.c_void_p * len(offsets))(*(at + offset for offset in offsets))
        self._attributes = ctypes.create_string_buffer(2 * _ATTRIBUTE_BYTES)
        struct.pack_into(
            "=I4xI", self._attributes, _ATTRIBUTE_BYTES, _PROGRAMMATIC_STREAM_SERIALIZATION, 1
        )
        self._has_pdl = has_pdl
        self._config = ctypes.create_string_buffer(_SHAPE_AND_STREAM.size + _ATTRIBUTES.size)
        self._set_cluster(1)
        self._handle = ctypes.c_void_p(handle)
        self._call = library.cuLaunchKernelEx
        self._device_index = device_index
        # torch.cuda.current_stream() makes an object and costs more than the launch.
        self._stream_of: Any = torch._C._cuda_getCurrentRawStream  # torch has no stub for it

    def _set_cluster(self, size: int) -> None:
        """Pass the driver the two attributes, or the second alone for blocks on their own."""
        self._cluster = size
        struct.pack_into("=I4x3I", self._attributes, 0, _CLUSTER_DIMENSION, size, 1, 1)
        at = ctypes.addressof(self._attributes)
        is_alone = size == 1
        _ATTRIBUTES.pack_into(
            self._config, _SHAPE_AND_STREAM.size,
            at + _ATTRIBUTE_BYTES * is_alone, self._has_pdl + (not is_alone),
        )  # fmt: skip

    def __call__(
        self,
        grid: tuple[int, int],
        block: tuple[int, int],
        *args: float | bytes,
        shared_bytes: int = 0,
        cluster: int = 1,
    ) -> None:
        """Submit the kernel to torch's current stream.

        Raises:
            PluginError: The driver refused.
        """
        if cluster != self._cluster:
            self._set_cluster(cluster)
        self._pack_arguments(self._arguments, 0, *args)
        stream = self._stream_of(self._device_index)
        _SHAPE_AND_STREAM.pack_into(
            self._config, 0, grid[0], grid[1], 1, block[0], block[1], 1, shared_bytes, stream
        )
        status = self._call(self._config, self._handle, self._addresses, None)
        if status:
            raise PluginError(
                f"kernel {self._name}: launch of {grid} blocks of {block} threads failed with "
                f"CUDA driver error {status}"
            )


def argument_offsets(layout: str) -> list[int]:
    """Return where each argument begins in the bytes that `struct` packs."""
    offsets, before = [], ""
    for kind in re.findall(r"\d*\D", layout):
        before += kind
        offsets.append(struct.calcsize(before) - struct.calcsize(kind))
    return offsets
