"""Timing of short kernels by graph replay, the inputs of ops, and the table of results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.ops.contract import QKVInputs, SamplingInputs

BF16 = torch.bfloat16
DEVICE = torch.device("cuda", 0)
ROTATED_BYTES = 240e6  # four times the L2 cache of an H200
Call = Callable[[], object]


class Line(NamedTuple):
    """One row of the table; microseconds, ``None`` where there is nothing to compare."""

    op: str
    shape: str
    ours: float
    floor: float
    torch: float | None = None
    flashinfer: float | None = None


def time_graph(calls: Sequence[Call], num_calls: int = 64) -> float:
    """Return median microseconds per call of graphs that make ``calls`` in turn."""
    num_calls = -(-num_calls // len(calls)) * len(calls)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which may still be filling the inputs
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(num_calls):
                calls[i % len(calls)]()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(8)]
        graph.replay()
        for event in events:
            event.record()
            graph.replay()
        stream.synchronize()
    times: list[float] = [a.elapsed_time(b) for a, b in zip(events[:-1], events[1:], strict=True)]
    return statistics.median(times) * 1000 / num_calls


def copies(num_bytes: float) -> int:
    """Return how many sets of buffers keep one from staying in the cache."""
    return max(1, min(64, int(ROTATED_BYTES / num_bytes)))


def randn(*shape: int) -> Tensor:
    """Return normal bf16 numbers."""
    return torch.randn(*shape, device=DEVICE, dtype=BF16)


def qkv_inputs(rows: int, num_q: int, num_kv: int) -> QKVInputs:
    """Return what the op between the product and attention needs, at head dimension 128."""
    return QKVInputs(
        num_qo_heads=num_q,
        num_kv_heads=num_kv,
        head_dim=128,
        q_norm=randn(128),
        k_norm=randn(128),
        eps=1e-6,
        positions=torch.arange(rows, device=DEVICE, dtype=torch.int32) % 4096,
        cos_sin_cache=torch.rand(4096, 128, device=DEVICE),
        k_pool=randn(rows, num_kv, 128),
        v_pool=randn(rows, num_kv, 128),
        out_loc=torch.randperm(rows, device=DEVICE),
    )


def sampling_inputs(
    rows: int,
    temperature: float = 1.0,
    top_k: float = 1 << 30,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> SamplingInputs:
    """Return equal parameters for every row."""

    def full(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device=DEVICE)

    return SamplingInputs(
        full(temperature, torch.float32), full(top_k, torch.int32), full(top_p, torch.float32),
        full(min_p, torch.float32), torch.arange(rows, device=DEVICE), full(5, torch.int32),
    )  # fmt: skip


def show(lines: Sequence[Line]) -> None:
    """Print the table."""
    head = f"{'op':28} {'shape':16} {'ours':>8} {'floor':>8} {'share':>6}"
    print(head, f"{'torch':>8} {'x':>5} {'fi':>8} {'x':>5}")
    for line in lines:
        cells = [
            f"{line.op:28} {line.shape:16} {line.ours:8.2f} {line.floor:8.2f}",
            f"{line.floor / line.ours:6.0%}",
        ]
        for other in (line.torch, line.flashinfer):
            cells.append(
                "       -     -" if other is None else f"{other:8.2f} {other / line.ours:5.1f}"
            )
        print(" ".join(cells))
