"""``cuda.bindings.driver`` for tests of memory that ranks share: they are threads, it is malloc."""

from __future__ import annotations

import ctypes
from typing import Any

CHANGES = 0xFFFF  # what is between an address and the one at which another process maps it


class Handle:
    """``CUipcMemHandle``: 64 bytes that only the driver understands."""

    def __init__(self) -> None:
        self._bytes = ctypes.create_string_buffer(64)

    def getPtr(self) -> int:
        return ctypes.addressof(self._bytes)


class PeerDriver:
    """The functions that `PeerMemory` calls; keeps account of what is mapped and allocated."""

    CUipcMemHandle = Handle

    class CUipcMem_flags:  # noqa: N801  # its name there
        CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1

    def __init__(self) -> None:
        self.blocks: dict[int, Any] = {}
        self.num_mapped = 0

    def cuMemAlloc(self, num_bytes: int) -> tuple[int, int]:
        block = ctypes.create_string_buffer(b"\x77" * num_bytes, num_bytes)
        self.blocks[ctypes.addressof(block)] = block
        return 0, ctypes.addressof(block)

    def cuMemsetD8(self, address: int, value: int, num_bytes: int) -> tuple[int]:
        ctypes.memset(address, value, num_bytes)
        return (0,)

    def cuCtxSynchronize(self) -> tuple[int]:
        return (0,)

    def cuIpcGetMemHandle(self, address: int) -> tuple[int, Handle]:
        assert address in self.blocks, "only the beginning of an allocation has a handle"
        handle = Handle()
        ctypes.memmove(handle.getPtr(), (address ^ CHANGES).to_bytes(8, "little"), 8)
        return 0, handle

    def cuIpcOpenMemHandle(self, handle: Handle, flags: int) -> tuple[int, int]:
        assert flags == 1, "peer access is enabled by the mapping"
        self.num_mapped += 1
        return 0, int.from_bytes(ctypes.string_at(handle.getPtr(), 8), "little") ^ CHANGES

    def cuIpcCloseMemHandle(self, address: int) -> tuple[int]:
        self.num_mapped -= 1
        return (0,)

    def cuMemFree(self, address: int) -> tuple[int]:
        del self.blocks[address]
        return (0,)
