"""One face for CPU and CUDA: streams, events, pinned memory, memory sizes, thread counts.

On a CPU, streams and events do nothing: every op has run when its call returns, so waiting for it
is always already over. The same engine code therefore runs on both.
"""

from __future__ import annotations

import math
import mmap
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import torch

from minisgl.errors import SettingsError

_MIN_MAPPED_BYTES = 1 << 20


class Event:
    """A point in a stream's work that the host can wait for."""

    def __init__(self, device: torch.device) -> None:
        """Make an event that has already happened."""
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def record(self) -> None:
        """Mark the end of the work submitted so far to the current stream."""
        if self._event is not None:
            self._event.record()

    def synchronize(self) -> None:
        """Block the host until the marked work is done."""
        if self._event is not None:
            self._event.synchronize()


class Stream:
    """A queue of device work; on a CPU there is only one and it is always empty."""

    def __init__(self, device: torch.device) -> None:
        """Make a new stream on ``device``."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def activate(self) -> AbstractContextManager[object]:
        """Make this the stream to which the ``with`` block submits."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait_for_current(self) -> None:
        """Let work submitted here from now on wait for what the current stream has so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def synchronize(self) -> None:
        """Block the host until all submitted work is done."""
        if self._stream is not None:
            self._stream.synchronize()


def pick_device(name: str, rank: int = 0) -> torch.device:
    """Turn ``--device`` into a device and make it current.

    Args:
        name: ``"auto"`` (CUDA where there is one), ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        rank: Tensor-parallel rank on this machine; offsets the CUDA index.

    Raises:
        SettingsError: The device does not exist here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SettingsError(f"--device {name}: no CUDA device is usable here; allowed: auto, cpu")
    try:
        base = torch.device(name)
    except RuntimeError as error:
        raise SettingsError(f"--device {name}: allowed: auto, cpu, cuda, cuda:N") from error
    index = (base.index or 0) + rank
    if base.type != "cuda" or index >= torch.cuda.device_count():
        raise SettingsError(
            f"--device {name}: rank {rank} needs CUDA device {index}, "
            f"and there are {torch.cuda.device_count()}"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def empty_host(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Allocate ``[num_bytes]`` uint8 on the host, pinned where ``device`` copies from it."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to a device behind what was submitted to it, without waiting for that.

    A copy from memory that is not pinned waits for everything in front of it.

    Returns:
        A tensor of the array's shape and dtype; the array may be changed at once.
    """
    if device.type == "cpu":
        return torch.from_numpy(array.copy())
    return torch.from_numpy(array).pin_memory().to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Submit a copy to the host, into pinned memory, so that nobody waits for it here.

    Returns:
        A tensor of the same shape and dtype; filled when an `Event` that is recorded now has come.
    """
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)


def empty_parameter(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Allocate a parameter, uninitialised; on a CPU so that it gives all its memory back.

    Packing replaces one large tensor after the other, and what is freed between others would stay
    with the C library.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes < _MIN_MAPPED_BYTES:
        return torch.empty(shape, dtype=dtype, device=device)
    return map_zeros(num_bytes).view(dtype).view(shape)


def map_zeros(num_bytes: int) -> torch.Tensor:
    """Map ``[num_bytes]`` zeroed uint8 on the host, at least one.

    The memory is taken page by page once it is written, and goes back to the system with the
    tensor. ``torch.zeros`` writes it all at once, and numpy asks for huge pages, so that to write
    one byte takes two megabytes.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):
        return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=private), dtype=torch.uint8)


def free_memory_bytes(device: torch.device) -> int:
    """Return the free memory of a CUDA device in bytes, caches of the allocator emptied."""
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def compute_capability(device: torch.device) -> int | None:
    """Return ``major * 10 + minor`` of a CUDA device, or ``None``."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def set_cpu_threads(num_ranks: int) -> int:
    """Use one thread per physical core, divided by the ranks that share the machine.

    A decode step is many small products: more threads than cores, hyper-threads included, cost
    more in barriers than they bring. ``OMP_NUM_THREADS`` wins when the user has set it.

    Returns:
        The number of threads in use.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, _physical_cores() // num_ranks))
    return torch.get_num_threads()


def _physical_cores() -> int:
    """Count physical cores that this process may run on."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    if allowed is None:
        return os.cpu_count() or 1
    cores = set()
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text())
        except OSError:
            cores.add(str(cpu))  # no topology here (some containers): count logical ones
    return len(cores)
