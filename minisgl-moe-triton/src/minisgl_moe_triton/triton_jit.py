"""``triton.jit`` with types."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import triton

from minisgl_moe_triton.settings import is_interpreted

# Triton's interpreter keeps in a global which program of a grid it is at.
_interpreter_lock = threading.Lock()


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


def turn_to_launch() -> AbstractContextManager[object]:
    """Return what to launch kernels within: the interpreter serves one thread at a time."""
    return _interpreter_lock if is_interpreted() else nullcontext()
