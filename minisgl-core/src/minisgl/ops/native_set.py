"""The kernel set ``native``: our own C++ kernels for a CPU, float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from minisgl.ops.contract import KernelConfig, KernelSet
from minisgl.ops.native_linear import load_kernels, pack_gated_linear, pack_linear
from minisgl.ops.native_rows import row_ops


class NativeKernelSet(KernelSet):
    """Offers what it is quicker at than PyTorch; all is compiled and loaded when it is made."""

    def __init__(self, config: KernelConfig) -> None:
        """Compile what is not in the cache, and load it.

        Raises:
            CompileError: There is no compiler, or it refuses.
        """
        load_kernels()
        self._row_ops = row_ops(config)

    def ops(self) -> Mapping[str, Callable[..., Any]]:
        """Return the ops by name."""
        return {
            "pack_linear": pack_linear,
            "pack_gated_linear": pack_gated_linear,
            **self._row_ops,
        }
