"""Code that runs from a graph: a real one on a GPU, on a CPU one that stands for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class CapturedStep:
    """Some code captured once and replayed: a CUDA graph, or on a CPU a call that stands for one.

    Attributes:
        output: The fixed tensor that a replay fills.
    """

    def __init__(self, step: Callable[[], Tensor], device: torch.device) -> None:
        """Capture ``step``; it may read fixed tensors alone."""
        self._step = step
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            step()  # lazy initialisation must not be captured
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self.output = step()
        else:
            self.output = step().clone()

    def replay(self) -> Tensor:
        """Run it again."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self.output.copy_(self._step())
        return self.output
