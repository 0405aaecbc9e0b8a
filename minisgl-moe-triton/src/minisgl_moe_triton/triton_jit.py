"""``triton.jit`` with types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import triton


class Kernel(Protocol):
    """A compiled function: ``kernel[grid](...)`` from outside, a plain call from other kernels."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        """Return what launches it on a grid."""

    def __call__(self, *args: Any) -> Any:  # Any: tensors of Triton
        """Inline it into the calling kernel."""


def jit(function: Callable[..., object]) -> Kernel:
    """Compile a kernel at its first call, or interpret it where ``TRITON_INTERPRET=1``."""
    kernel: Kernel = triton.jit(function)
    return kernel
