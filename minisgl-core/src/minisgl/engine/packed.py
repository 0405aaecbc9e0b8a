"""Many small host arrays as one buffer, so that one copy brings a whole step to the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from minisgl.device import Event, empty_host

_ALIGN = 16  # bytes; vector loads of every dtype stay aligned
_TORCH: Mapping[np.dtype[Any], torch.dtype] = {  # Any: each has another scalar
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}
_NUMPY = {v: k for k, v in _TORCH.items()}


class Field(NamedTuple):
    """One array of a layout.

    Attributes:
        name: By which the views are found.
        dtype: Of both views; int32, int64 or float32.
        length: Elements.
    """

    name: str
    dtype: torch.dtype
    length: int


class PackedLayout:
    """Where each field lies in a buffer of bytes.

    Attributes:
        num_bytes: Up to where the fields go, from the start of the buffer; a multiple of 16.
    """

    def __init__(self, fields: Sequence[Field], start: int = 0) -> None:
        """Place the fields one after the other, each aligned to 16 bytes.

        Args:
            fields: Their names are distinct.
            start: Bytes at the start of the buffer that belong to another layout: its `num_bytes`.
        """
        self._spans: list[tuple[Field, int, int]] = []
        offset = start
        for field in fields:
            end = offset + field.length * field.dtype.itemsize
            self._spans.append((field, offset, end))
            offset = -(-end // _ALIGN) * _ALIGN
        self.num_bytes = offset

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the fields of a uint8 buffer, a tensor of its own; views, on its device."""
        typed = {dtype: buffer.view(dtype) for dtype in {f.dtype for f, _, _ in self._spans}}
        # The quickest way to a view; a step needs some fifteen of them.
        return {
            f.name: typed[f.dtype].as_strided((f.length,), (1,), a // f.dtype.itemsize)
            for f, a, _ in self._spans
        }

    def arrays(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """Return the fields of a uint8 buffer on the host; views."""
        return {f.name: buffer[a:b].view(_NUMPY[f.dtype]) for f, a, b in self._spans}


def layout_of(arrays: Mapping[str, np.ndarray], start: int = 0) -> PackedLayout:
    """Return the layout of arrays that exist; see `PackedLayout`."""
    return PackedLayout([Field(k, _TORCH[a.dtype], len(a)) for k, a in arrays.items()], start)


def packed_bytes(arrays: Mapping[str, np.ndarray]) -> int:
    """Return how many bytes arrays take when they are packed; a multiple of 16."""
    return sum(-(-array.nbytes // _ALIGN) * _ALIGN for array in arrays.values())


class Staging:
    """Pinned host buffers in a ring, and the one device buffer into which they are copied.

    The host runs one step ahead of the device, so the copy of a step may not have happened when
    the next step is packed: each host buffer has an event that is waited for before it is written
    again. The device buffer needs none, because copies and kernels share one stream. On a CPU the
    host buffer is the device buffer, and nothing is copied.

    Attributes:
        host: ``[num_bytes]`` uint8 each.
        memory: The same as numpy sees them.
        device: ``[num_bytes]`` uint8.
        num_bytes: Of each buffer.
        current: Index of the host buffer that was acquired last.
    """

    def __init__(self, num_bytes: int, device: torch.device, num_buffers: int = 3) -> None:
        """Allocate for steps of up to ``num_bytes``."""
        is_cpu = device.type == "cpu"
        count = 1 if is_cpu else num_buffers
        self.host = [empty_host(num_bytes, device) for _ in range(count)]
        self.memory = [host.numpy() for host in self.host]
        self.device = (
            self.host[0] if is_cpu else torch.empty(num_bytes, dtype=torch.uint8, device=device)
        )
        self.num_bytes = num_bytes
        self._events = [Event(device) for _ in range(count)]
        self.current = 0

    def acquire(self) -> int:
        """Wait until the next host buffer may be written, and return its index."""
        self.current = (self.current + 1) % len(self.host)
        self._events[self.current].synchronize()
        return self.current

    def submit(self, num_bytes: int) -> None:
        """Copy the first bytes of the acquired host buffer to the device, asynchronously."""
        host = self.host[self.current]
        if host is not self.device:
            self.device[:num_bytes].copy_(host[:num_bytes], non_blocking=True)
            self._events[self.current].record()

    def send(self, arrays: Mapping[str, np.ndarray], num_bytes: int = 0) -> dict[str, torch.Tensor]:
        """Bring arrays to the device, with what lies in front of them, in one go.

        Args:
            arrays: To be written to the acquired host buffer.
            num_bytes: At its start, which have been written already.

        Returns:
            The arrays on the device.
        """
        if not arrays:
            self.submit(num_bytes)
            return {}
        layout = layout_of(arrays, start=num_bytes)
        for name, view in layout.arrays(self.memory[self.current]).items():
            view[:] = arrays[name]
        self.submit(layout.num_bytes)
        return layout.views(self.device)


class GrowingStaging:
    """Staging for steps of any size.

    What it holds is good until the next step, whose copy comes behind every kernel of this one on
    the stream.
    """

    def __init__(self, device: torch.device, num_bytes: int = 1 << 16) -> None:
        """Make room for so many bytes at first."""
        self._device = device
        self._staging = Staging(num_bytes, device)

    def of(self, num_bytes: int) -> Staging:
        """Return buffers that hold at least so many bytes."""
        if num_bytes > self._staging.num_bytes:
            self._staging = Staging(2 * num_bytes, self._device)
        return self._staging

    def send(self, arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Bring arrays to the device, in one copy, and return them there."""
        staging = self.of(packed_bytes(arrays))
        staging.acquire()
        return staging.send(arrays)
