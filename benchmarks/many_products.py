"""Products of a prefill or of a large batch on a GPU: our kernels and cuBLAS, fresh and under load.

A GPU that has worked for a second lowers its clock to stay within its power, and what is quickest
then needs the least energy. So each product is timed twice: in bursts with pauses, and at the end
of a second without. Ours and cuBLAS take turns, and the median of their turns counts.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernel_timing import BF16, DEVICE, Call, randn
from minisgl.ops.contract import ActAndMul
from minisgl_kernels_cuda.activation import build_activations
from minisgl_kernels_cuda.driver import device_size
from minisgl_kernels_cuda.linear import LinearKernels
from minisgl_kernels_cuda.linear_plans import MAX_ROWS
from minisgl_kernels_cuda.linear_wide import MAX_WIDE_ROWS
from minisgl_kernels_cuda.units import Loader

Shape = tuple[int, int]
_BURST_S, _PAUSE_S = 0.01, 0.2
_TURNS = 3


class LargeKernels(LinearKernels):
    """Kernels that leave no product to the library.

    Gated ones of up to 192 rows go to the kernel of wide weights, all others to that of many rows.
    """

    def __init__(self, loader: Loader, activations: Mapping[str, ActAndMul]) -> None:
        """Load the kernels."""
        super().__init__(loader, BF16, device_size(DEVICE), 0, activations, uses_many=True)

    def many_rows(self, n: int, k: int, is_gated: bool) -> range:
        """Choose it for all that the other one leaves."""
        return range(1, sys.maxsize)

    def wide_rows(self, n: int, k: int) -> range:
        """Choose it for all that it takes."""
        return range(1, MAX_WIDE_ROWS + 1)


class Case(NamedTuple):
    """One product.

    Attributes:
        rows: Of x.
        shape: Outputs and inputs of the weight.
        is_gated: Whether SiLU and the product of its halves come behind it.
    """

    rows: int
    shape: Shape
    is_gated: bool

    @property
    def teraflops(self) -> float:
        """Arithmetic of the product, in 1e12 operations."""
        return 2e-12 * self.rows * self.shape[0] * self.shape[1]

    @property
    def title(self) -> str:
        """Its name in the table."""
        n, k = self.shape
        return f"{self.rows:>5} x {n} x {k}{' gated' if self.is_gated else ''}"


class Times(NamedTuple):
    """Seconds of a product."""

    burst: float
    sustained: float


class Replay:
    """A graph of calls that takes about `_BURST_S`."""

    def __init__(self, call: Call, call_s: float) -> None:
        """Capture it.

        Args:
            call: What is timed.
            call_s: About how long it takes.
        """
        self._num_calls = max(1, round(_BURST_S / call_s))
        self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            call()
            self._stream.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=self._stream):
                for _ in range(self._num_calls):
                    call()

    def time(self) -> float:
        """Return seconds per call of one replay."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            begin.record()
            self._graph.replay()
            end.record()
            end.synchronize()
        ms: float = begin.elapsed_time(end)
        return ms / 1000 / self._num_calls

    def burst(self) -> float:
        """Return seconds per call after a pause."""
        time.sleep(_PAUSE_S)
        return self.time()

    def sustained(self, seconds: float) -> float:
        """Return seconds per call in the second half of so many seconds of work."""
        started, times = time.perf_counter(), []
        while (now := time.perf_counter() - started) < seconds:
            took = self.time()
            if now > seconds / 2:
                times.append(took)
        return statistics.median(times)


def cases(shapes: Sequence[Shape], rows_list: Sequence[int]) -> Iterator[Case]:
    """Yield what is timed: the third shape, of gate and up, gated too."""
    for rows in rows_list:
        for i, shape in enumerate(shapes):
            yield Case(rows, shape, False)
            if i == 2:
                yield Case(rows, shape, True)


def time_case(
    case: Case, kernels: LinearKernels, silu_and_mul: ActAndMul, seconds: float
) -> dict[str, Times]:
    """Return the times of ``ours`` and ``cublas``."""
    x, weight = randn(case.rows, case.shape[1]), randn(*case.shape) / case.shape[1] ** 0.5
    ours = kernels.pack_linear(weight, None)
    library: Call = partial(F.linear, x, weight)
    if case.is_gated:
        ours = kernels.pack_gated_linear(weight, None, "silu")
        library = partial(_linear_and_act, x, weight, silu_and_mul)
    call_s = case.teraflops / 600
    replays = {"ours": Replay(partial(ours, x), call_s), "cublas": Replay(library, call_s)}
    bursts: dict[str, list[float]] = {name: [] for name in replays}
    loads: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(_TURNS):
        for name, replay in replays.items():
            bursts[name].append(replay.burst())
    for _ in range(_TURNS):
        for name, replay in replays.items():
            loads[name].append(replay.sustained(seconds))
    return {
        name: Times(statistics.median(bursts[name]), statistics.median(loads[name]))
        for name in replays
    }


def _linear_and_act(x: Tensor, weight: Tensor, act_and_mul: ActAndMul) -> Tensor:
    return act_and_mul(F.linear(x, weight))


def time_many(
    loader: Loader,
    shapes: Sequence[Shape],
    rows_list: Sequence[int],
    seconds: float,
    is_chosen: bool = False,
) -> None:
    """Time all and print a table: microseconds and 1e12 operations per second.

    Args:
        loader: Of the kernels.
        shapes: Outputs and inputs of q/k/v, o, gate and up, down.
        rows_list: Rows.
        seconds: Of each turn under load.
        is_chosen: Whether ours is what the engine would take, the library included.
    """
    activations = build_activations(loader, BF16)
    kernels: LinearKernels = LargeKernels(loader, activations)
    if is_chosen:
        size = device_size(DEVICE)
        kernels = LinearKernels(loader, BF16, size, MAX_ROWS, activations, uses_many=True)
    print(f"{'rows x outputs x inputs':30} {'':10} {'ours us':>9} {'cublas':>9} {'T/s':>5} {'':5}")
    for case in cases(shapes, rows_list):
        times = time_case(case, kernels, activations["silu_and_mul"], seconds)
        for kind in Times._fields:
            ours, cublas = (float(getattr(times[name], kind)) for name in ("ours", "cublas"))
            print(
                f"{case.title:30} {kind:10} {ours * 1e6:9.1f} {cublas * 1e6:9.1f} "
                f"{case.teraflops / ours:5.0f} {case.teraflops / cublas:5.0f} "
                f"{cublas / ours:6.3f}",
                flush=True,
            )
