"""``triton.jit`` with types, and names for what a kernel's arguments are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import triton

Pointer = Any  # a tensor outside a kernel, a pointer inside; Triton has no type for both
Scalar = Any  # a number outside, a tensor of one element inside
Tile = Any  # a tensor of Triton, whose methods have no annotations


class Kernel(Protocol):
    """A compiled function: ``kernel[grid](...)`` from outside, a plain call from other kernels."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        """Return what launches it on a grid."""

    def __call__(self, *args: Any) -> Any:  # Any: see Tile
        """Inline it into the calling kernel."""


def jit(function: Callable[..., object]) -> Kernel:
    """Compile a kernel at its first call, or interpret it where ``TRITON_INTERPRET=1``."""
    kernel: Kernel = triton.jit(function)
    return kernel
