"""An NCCL communicator of our own, on the library that torch has loaded.

Its calls go to the stream that they are given and to no other, and leave nothing behind that a
watching thread has to look after, so they are captured in a CUDA graph like any kernel.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from typing import Any

import torch

from minisgl.errors import CommError, PluginError
from minisgl_kernels_cuda.settings import NCCL_SONAME, installed_nccl

# From nccl.h.
_UNIQUE_ID_BYTES = 128
_SUCCESS, _IN_PROGRESS = 0, 7
_SUM = 0
_TYPES: Mapping[torch.dtype, int] = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}

_ABORT_LOCK_S = 1.0


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * _UNIQUE_ID_BYTES),)


class NcclLibrary:
    """The functions of NCCL; a failing one raises."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Declare what is called."""
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        signatures: dict[str, list[Any]] = {  # Any: types of ctypes
            "ncclGetUniqueId": [ctypes.POINTER(_UniqueId)],
            "ncclCommInitRank": [
                ctypes.POINTER(pointer), ctypes.c_int, _UniqueId, ctypes.c_int,
            ],
            "ncclAllReduce": [
                pointer, pointer, size, ctypes.c_int, ctypes.c_int, pointer, pointer,
            ],
            "ncclAllGather": [pointer, pointer, size, ctypes.c_int, pointer, pointer],
            "ncclCommAbort": [pointer],
        }  # fmt: skip
        self._library = library
        for name, types in signatures.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, ctypes.c_int
        library.ncclGetErrorString.argtypes = [ctypes.c_int]
        library.ncclGetErrorString.restype = ctypes.c_char_p

    def call(self, name: str, *args: Any) -> None:  # Any: each function has its own
        """Call a function.

        Raises:
            CommError: It failed.
        """
        status = getattr(self._library, name)(*args)
        if status not in (_SUCCESS, _IN_PROGRESS):
            text = self._library.ncclGetErrorString(status).decode(errors="replace")
            raise CommError(f"{name} failed: {text}; NCCL_DEBUG=WARN shows more")

    def unique_id(self) -> bytes:
        """Make the id of a new communicator; for one rank."""
        made = _UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made)

    def join(self, unique_id: bytes, rank: int, size: int) -> int:
        """Make this rank's end of a communicator, on the current device; waits for all ranks."""
        comm = ctypes.c_void_p()
        of_all = _UniqueId.from_buffer_copy(unique_id)
        self.call("ncclCommInitRank", ctypes.byref(comm), size, of_all, rank)
        assert comm.value is not None, "a rank that has joined has its end"
        return comm.value


class NcclCommunicator:
    """One rank's end of a communicator."""

    def __init__(self, library: NcclLibrary, comm: int) -> None:
        """Take a communicator.

        Args:
            library: The library that it is of.
            comm: What `NcclLibrary.join` returned.
        """
        self._library = library
        self._comm: int | None = comm
        self._lock = threading.Lock()  # nobody uses what another thread aborts

    def all_reduce(self, x: torch.Tensor, stream: int) -> None:
        """Sum a contiguous tensor over ranks in place, on a stream."""
        at, count, kind = x.data_ptr(), x.numel(), _type_of(x)
        with self._lock:
            self._library.call("ncclAllReduce", at, at, count, kind, _SUM, self._end(), stream)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, stream: int) -> None:
        """Fill ``out[size, ...]`` with the contiguous ``x[...]`` of each rank, on a stream."""
        count, kind = x.numel(), _type_of(x)
        with self._lock:
            self._library.call(
                "ncclAllGather", x.data_ptr(), out.data_ptr(), count, kind, self._end(), stream
            )

    def abort(self) -> None:
        """Let kernels that wait for other ranks end, and let go of everything; from any thread.

        Safe to call twice. Graphs that were captured with it must not be launched any more; while
        there are any, this does not return.
        """
        is_ours = self._lock.acquire(timeout=_ABORT_LOCK_S)  # a call may wait for a lost rank
        comm, self._comm = self._comm, None
        if is_ours:
            self._lock.release()
        if comm is not None:
            self._library.call("ncclCommAbort", comm)

    def _end(self) -> int:
        if self._comm is None:
            raise CommError("another rank is gone: the communicator was aborted")
        return self._comm


def load_nccl() -> NcclLibrary:
    """Open the library that torch has loaded, or the installed one.

    Raises:
        PluginError: There is none.
    """
    try:
        return NcclLibrary(ctypes.CDLL(NCCL_SONAME))
    except (OSError, AttributeError):
        path = installed_nccl()
    if path is None:
        raise PluginError("--comm cuda: NCCL is not installed: pip install nvidia-nccl-cu13")
    try:
        return NcclLibrary(ctypes.CDLL(str(path)))
    except (OSError, AttributeError) as error:
        raise PluginError(f"--comm cuda: NCCL cannot be loaded: {error}") from error


def _type_of(x: torch.Tensor) -> int:
    if x.dtype not in _TYPES:
        raise PluginError(f"--comm cuda: NCCL has no numbers of type {x.dtype}")
    return _TYPES[x.dtype]
