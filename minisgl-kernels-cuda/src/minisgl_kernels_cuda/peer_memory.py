"""Memory of each rank that the kernels of all ranks of one host can write: CUDA IPC.

Plain allocations alone: no managed memory, and no multicast objects.
"""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

import torch

from minisgl.distributed.control import ControlGroup
from minisgl.errors import PluginError

_HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE


class PeerMemory:
    """An allocation of each rank, mapped into this process.

    Attributes:
        addresses: Where each rank's allocation begins in this process, by rank.
    """

    def __init__(self, control: ControlGroup, device: torch.device, num_bytes: int) -> None:
        """Allocate zeros, and map those of the others; every rank does so at the same time.

        Raises:
            PluginError: The driver refused.
        """
        # Heavy, and missing where the backend is only discovered.
        from cuda.bindings import driver  # noqa: PLC0415

        self._driver: Any = driver  # its stubs know no structures
        self._opened: list[int] = []
        torch.cuda.synchronize(device)  # makes the device's context this thread's
        self._own = int(self._call("cuMemAlloc", num_bytes))
        self._call("cuMemsetD8", self._own, 0, num_bytes)
        self._call("cuCtxSynchronize")
        handle = self._call("cuIpcGetMemHandle", self._own)
        # By the time the others' handles are here, so are their zeros.
        handles = control.gather_bytes(ctypes.string_at(handle.getPtr(), _HANDLE_BYTES))
        self.addresses = tuple(
            self._own if rank == control.rank else self._open(handles[rank])
            for rank in range(control.size)
        )

    def close(self) -> None:
        """Unmap and free; for when no kernel of this rank uses it any more. Safe to call twice."""
        while self._opened:
            self._call("cuIpcCloseMemHandle", self._opened.pop())
        if self._own:
            self._call("cuMemFree", self._own)
            self._own = 0

    def _open(self, handle: bytes) -> int:
        opaque = self._driver.CUipcMemHandle()
        ctypes.memmove(opaque.getPtr(), handle, _HANDLE_BYTES)
        flags = self._driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        address = int(self._call("cuIpcOpenMemHandle", opaque, int(flags)))
        self._opened.append(address)
        return address

    def _call(self, name: str, *args: Any) -> Any:  # Any: each function has its own
        status, *result = getattr(self._driver, name)(*args)
        if int(status):
            raise PluginError(f"--comm cuda: {name} failed with CUDA driver error {status}")
        return result[0] if result else None


def can_share(control: ControlGroup, device: torch.device) -> bool:
    """Whether every rank's device can write the memory of every other's; all ranks call it.

    They have to be different devices of this machine that this process sees.
    """
    uuids = control.gather_bytes(_uuid(device.index))
    ours = [_uuid(index) for index in range(torch.cuda.device_count())]
    is_here = all(peer.is_local for peer in control.peers) and len(set(uuids)) == len(uuids)
    can = is_here and all(
        uuid in ours and torch.cuda.can_device_access_peer(device.index, ours.index(uuid))
        for rank, uuid in enumerate(uuids)
        if rank != control.rank
    )
    return control.min_int(int(can)) == 1


def _uuid(index: int) -> bytes:
    """Return what tells a device from all others."""
    uuid: Any = torch.cuda.get_device_properties(index).uuid  # torch's stub lacks it
    return hashlib.sha256(str(uuid).encode()).digest()
