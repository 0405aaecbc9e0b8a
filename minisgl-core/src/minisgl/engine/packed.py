"""Many small host arrays as one buffer, so that one copy brings a whole step to the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from minisgl.device import Event, empty_host

_ALIGN = 16  # bytes; vector loads of every dtype stay aligned


class Field(NamedTuple):
    """One array of a layout.

    Attributes:
        name: By which the views are found.
        dtype: Of both views.
        length: Elements.
    """

    name: str
    dtype: torch.dtype
    length: int


class PackedLayout:
    """Where each field lies in a buffer of bytes."""

    def __init__(self, fields: Sequence[Field]) -> None:
        """Place the fields one after the other, each aligned to 16 bytes."""
        self._spans: list[tuple[Field, int, int]] = []
        offset = 0
        for field in fields:
            end = offset + field.length * field.dtype.itemsize
            self._spans.append((field, offset, end))
            offset = -(-end // _ALIGN) * _ALIGN
        self.num_bytes = offset

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the fields of a ``[num_bytes]`` uint8 buffer; views, on the buffer's device."""
        return {f.name: buffer[a:b].view(f.dtype) for f, a, b in self._spans}


class Staging:
    """Pinned host buffers in a ring, and the one device buffer into which they are copied.

    The host runs one step ahead of the device, so the copy of a step may not have happened when
    the next step is packed: each host buffer has an event that is waited for before it is written
    again. The device buffer needs none, because copies and kernels share one stream. On a CPU the
    host buffer is the device buffer, and nothing is copied.
    """

    def __init__(self, num_bytes: int, device: torch.device, num_buffers: int = 3) -> None:
        """Allocate for steps of up to ``num_bytes``."""
        is_cpu = device.type == "cpu"
        count = 1 if is_cpu else num_buffers
        self.host = [empty_host(num_bytes, device) for _ in range(count)]
        self.device = (
            self.host[0] if is_cpu else torch.empty(num_bytes, dtype=torch.uint8, device=device)
        )
        self.num_bytes = num_bytes
        self._events = [Event(device) for _ in range(count)]
        self._current = 0

    def acquire(self) -> int:
        """Wait until the next host buffer may be written, and return its index."""
        self._current = (self._current + 1) % len(self.host)
        self._events[self._current].synchronize()
        return self._current

    def submit(self, num_bytes: int) -> None:
        """Copy the first bytes of the acquired host buffer to the device, asynchronously."""
        host = self.host[self._current]
        if host is not self.device:
            self.device[:num_bytes].copy_(host[:num_bytes], non_blocking=True)
            self._events[self._current].record()


def numpy_views(views: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Return numpy views of host tensors."""
    return {name: tensor.numpy() for name, tensor in views.items()}
