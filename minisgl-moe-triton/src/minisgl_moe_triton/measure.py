"""Timing one layer on a GPU, by replays of a CUDA graph."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from minisgl_moe_triton.launch import LayerInputs
from minisgl_moe_triton.plan import LayerShape

_REPLAYS = 15
_MIN_TOUCHED_BYTES = 400 << 20
"""Weights that the calls of one graph touch together at least: several times any cache."""
_MAX_SETS = 24

Call = Callable[[LayerInputs], object]


@dataclass(frozen=True, slots=True)
class Work:
    """What a call has to do at least.

    Attributes:
        num_bytes: Weights of the experts that any token chose, in bytes.
        flops: Operations of all products.
    """

    num_bytes: float
    flops: float


class LayerBench:
    """Random weights of one layer, and tokens for them."""

    def __init__(self, shape: LayerShape) -> None:
        """Fill the weights, scaled so that every intermediate value is about 1."""
        self.shape = shape
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._dtype: torch.dtype = getattr(torch, shape.dtype)
        self._random = torch.Generator(self.device).manual_seed(0)
        hidden, inner, num_experts = (
            shape.hidden_size, shape.intermediate_size, shape.num_experts,
        )  # fmt: skip
        self._weights = (
            self._randn(num_experts, 2 * inner, hidden).mul_(hidden**-0.5),
            self._randn(num_experts, hidden, inner).mul_(inner**-0.5),
        )

    def inputs(self, num_tokens: int, num_sets: int = 0) -> list[LayerInputs]:
        """Make sets of tokens, as many as keep the weights out of the caches unless told."""
        shape = self.shape
        count = num_sets or self._num_sets(num_tokens)
        return [
            LayerInputs(
                self._randn(num_tokens, shape.hidden_size),
                self._randn(num_tokens, shape.num_experts),
                *self._weights,
            )
            for _ in range(count)
        ]

    def work(self, sets: list[LayerInputs]) -> Work:
        """Count what one call does, as the mean over the sets."""
        shape = self.shape
        touched = 0
        for inputs in sets:
            chosen = inputs.router_logits.topk(shape.top_k, dim=-1).indices
            touched += len(chosen.unique())
        expert = 3 * shape.hidden_size * shape.intermediate_size
        slots = len(sets[0].hidden_states) * shape.top_k
        num_bytes = touched / len(sets) * expert * shape.itemsize
        return Work(num_bytes, 2.0 * slots * expert)

    def time_us(self, call: Call, sets: list[LayerInputs]) -> float:
        """Return the time of a call on the device, in microseconds; the median of replays."""
        return statistics.median(_timed(self.capture(call, sets).replay)) / len(sets)

    def capture(self, call: Call, sets: list[LayerInputs]) -> torch.cuda.CUDAGraph:
        """Capture a call on each of the sets, one behind the other, in one graph."""
        for inputs in sets[:2]:
            call(inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for inputs in sets:
                call(inputs)
        return graph

    def time_eager_us(self, call: Call, sets: list[LayerInputs]) -> float:
        """Return the time of a call that cannot be captured, the host's share included."""
        for inputs in sets[:2]:
            call(inputs)

        def run() -> None:
            for inputs in sets:
                call(inputs)

        return statistics.median(_timed(run, 5)) / len(sets)

    def _num_sets(self, num_tokens: int) -> int:
        shape = self.shape
        experts = min(shape.num_experts, num_tokens * shape.top_k)
        touched = experts * 3 * shape.hidden_size * shape.intermediate_size * shape.itemsize
        return min(_MAX_SETS, max(2, -(-_MIN_TOUCHED_BYTES // touched)))

    def _randn(self, *size: int) -> torch.Tensor:
        random, device, dtype = self._random, self.device, self._dtype
        return torch.randn(size, generator=random, device=device, dtype=dtype)


def _timed(run: Callable[[], object], count: int = _REPLAYS) -> Iterator[float]:
    """Yield the time of each run in microseconds, after two that do not count."""
    for i in range(count + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        if i >= 2:
            yield start.elapsed_time(end) * 1e3
