"""Decode steps captured once per batch size and replayed: CUDA graphs, and their CPU stand-in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class StepOutput(NamedTuple):
    """What a step leaves on the device.

    Attributes:
        logits: ``[num_rows, vocab_size]`` as the model made them.
        tokens: ``[num_rows]`` int32 sampled from them; already in the token pool.
    """

    logits: torch.Tensor
    tokens: torch.Tensor


StepFunction = Callable[[], StepOutput]


class StepGraph(ABC):
    """One captured step: reads and writes fixed tensors alone.

    Attributes:
        output: The fixed tensors that a replay fills.
    """

    output: StepOutput

    @abstractmethod
    def replay(self) -> None:
        """Submit the captured work again."""


class CudaGraph(StepGraph):
    """A CUDA graph; all graphs of an engine share one memory pool, as only one runs at a time."""

    def __init__(self, step: StepFunction, pool: Any) -> None:  # Any: torch's handle is opaque
        """Warm ``step`` up and capture it on the current stream."""
        step()  # lazy initialisation and autotuning must not be captured
        torch.cuda.current_stream().synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, stream=torch.cuda.current_stream()):
            self.output = step()

    @property
    def pool(self) -> Any:  # an opaque handle
        """The memory pool, for the next capture."""
        return self._graph.pool()

    def replay(self) -> None:
        """Launch the graph."""
        self._graph.replay()


class EmulatedGraph(StepGraph):
    """The same contract on a CPU: ``step`` runs again over what it saw at capture.

    ``step`` closes over the batch that was captured, so whatever a caller forgets to copy into the
    fixed buffers is missing here just as it would be in a CUDA graph.
    """

    def __init__(self, step: StepFunction) -> None:
        """Run ``step`` once; its results become the fixed output."""
        self._step = step
        self.output = StepOutput(*(t.clone() for t in step()))

    def replay(self) -> None:
        """Run the step and copy its results to the fixed output."""
        for fixed, new in zip(self.output, self._step(), strict=True):
            fixed.copy_(new)


class GraphKey(NamedTuple):
    """Which graph a decode batch needs.

    Attributes:
        size: Rows, padding included.
        is_all_greedy: Whether sampling is only an arg-max.
    """

    size: int
    is_all_greedy: bool


class GraphRunner:
    """All captured decode steps of an engine."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        """Take the ascending batch sizes to capture; none means graphs are off."""
        self.sizes = sizes
        self._graphs: dict[GraphKey, StepGraph] = {}
        self._pool: Any = None  # an opaque handle

    def padded_size(self, num_reqs: int) -> int | None:
        """Return the smallest captured size that fits, or ``None``: run without a graph."""
        i = bisect_left(self.sizes, num_reqs)
        return self.sizes[i] if i < len(self.sizes) else None

    def capture(self, key: GraphKey, step: StepFunction, device: torch.device) -> None:
        """Capture ``step`` for ``key``; larger sizes first, so that the pool is reused."""
        if device.type == "cuda":
            graph = CudaGraph(step, self._pool)
            self._pool = graph.pool
            self._graphs[key] = graph
        else:
            self._graphs[key] = EmulatedGraph(step)

    def replay(self, key: GraphKey) -> StepOutput:
        """Submit the step captured for ``key`` and return its fixed output."""
        graph = self._graphs[key]
        graph.replay()
        return graph.output

    def clear(self) -> None:
        """Let go of them all."""
        self._graphs.clear()


def graph_sizes(max_batch_size: int) -> tuple[int, ...]:
    """Return the batch sizes to capture: 1, 2, 4, 8, 16, 24, … and the maximum itself.

    Args:
        max_batch_size: Largest decode batch to capture; 0 captures none.
    """
    if max_batch_size <= 0:
        return ()
    sizes = {1, 2, 4, *range(8, max_batch_size + 1, 8), max_batch_size}
    return tuple(sorted(size for size in sizes if size <= max_batch_size))
