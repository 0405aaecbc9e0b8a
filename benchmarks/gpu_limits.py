"""What mini-sglang's offline workload takes on a GPU without all but products and attention.

    python -m benchmarks.gpu_limits --shape qwen3-14b

Every product of a layer is timed as the engine runs it, by numbers of rows, and so is decode
attention, by numbers of requests: at the end of a while without a pause, because a GPU that is
held back by its power then has the clock that it can keep. Beside the time stand power, clock and
energy, of each byte that has to be read or of each operation; reading alone comes first, of zeros
and of what looks like keys: bits that change take energy. The last line adds up the workload of
`benchmarks.offline` from these: decode steps by their batch sizes, keys and values at the bandwidth
that attention reached, prompts at the rate of the products of 8,192 rows.
"""

from __future__ import annotations

import argparse
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.devices import require_gpus
from benchmarks.gpu_attention import Case, Sizes, make_batch, make_context
from benchmarks.gpu_decode import layout_factory
from benchmarks.gpu_linear import MODELS, Model, load
from benchmarks.kernel_timing import BF16, DEVICE, copies, randn
from benchmarks.offline import workload
from benchmarks.power_meter import PowerMeter
from benchmarks.shapes import SHAPES
from minisgl.attention.contract import AttentionConfig, LayerAttention
from minisgl_kernels_cuda.activation import build_activations
from minisgl_kernels_cuda.driver import device_size
from minisgl_kernels_cuda.linear import LinearKernels
from minisgl_kernels_cuda.linear_plans import MAX_ROWS
from minisgl_kernels_cuda.units import Loader

NUM_ROWS = (1, 8, 16, 32, 64, 96, 128, 160, 192, 256)
PROMPT_ROWS = 8192
READ_BYTES = 2 << 30
NUM_REQS = (16, 64, 256)
CONTEXT = 768
NUM_KV_HEADS, HEAD_DIM = 8, 128  # of both models
_GRAPH_S = 0.01  # that a graph takes about, so that its launch does not count
_MODEL_OF = {"qwen3-0.6b": "0.6b", "qwen3-14b": "14b"}


class Amount(NamedTuple):
    """Work: bytes that have to be read, or operations."""

    size: int
    unit: str


class Bench:
    """Times calls under load.

    Attributes:
        loader: Of kernels.
        kernels: Products as the engine runs them.
    """

    def __init__(self, seconds: float, meter: PowerMeter) -> None:
        """Load the kernels; each call is timed for so many seconds."""
        self._seconds = seconds
        self._meter = meter
        self.loader: Loader = load()
        self.kernels = LinearKernels(
            self.loader, BF16, device_size(DEVICE), MAX_ROWS,
            build_activations(self.loader, BF16), uses_many=True,
        )  # fmt: skip

    def seconds(
        self, title: str, calls: Sequence[Callable[[], object]], about_s: float, amount: Amount
    ) -> float:
        """Return the time of one of several like calls, each of so much work, and print it."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        num_rounds = max(1, round(_GRAPH_S / about_s / len(calls)))
        with torch.cuda.stream(stream):
            for call in calls:
                call()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(num_rounds):
                    for call in calls:
                        call()
            self._replay(graph, stream)  # until the clock has settled
            started = time.perf_counter()
            seconds, num_replays = self._replay(graph, stream)
            watts, mhz = self._meter.between(started, time.perf_counter())
        each = seconds / (num_replays * num_rounds * len(calls))
        picojoules = watts * each / amount.size * 1e12
        print(
            f"{title:28} {each * 1e6:8.1f} us {amount.size / each / 1e12:7.2f} T{amount.unit}/s "
            f"{watts:5.0f} W {mhz:5.0f} MHz {picojoules:7.2f} pJ/{amount.unit}",
            flush=True,
        )
        return each

    def _replay(self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> tuple[float, int]:
        """Replay for half of the bench's seconds; return how long it was, and how many replays."""
        started, num_replays = time.perf_counter(), 0
        while (seconds := time.perf_counter() - started) < self._seconds / 2:
            graph.replay()
            stream.synchronize()
            num_replays += 1
        return seconds, num_replays

    def read(self) -> None:
        """Read memory and do nothing else, once of zeros and once of random numbers."""
        numbers = torch.empty(READ_BYTES // BF16.itemsize, dtype=BF16, device=DEVICE)
        words = numbers.view(torch.int32)
        fills = {"zeros": torch.Tensor.zero_, "random numbers": torch.Tensor.normal_}
        for title, fill in fills.items():
            fill(numbers)
            calls = [partial(torch.max, words)]
            self.seconds(f"reading {title}", calls, READ_BYTES / 4e12, Amount(READ_BYTES, "B"))

    def layer(self, model: Model, rows: int) -> float:
        """Return the seconds of a layer's products, the activation in those of gate and up."""
        total = 0.0
        for name, (n, k) in zip(("q/k/v", "o", "gate/up", "down"), model.products, strict=True):
            weights = [randn(n, k) / k**0.5 for _ in range(copies(2.0 * n * k))]
            x = randn(rows, k)
            pack = self.kernels.pack_linear
            if name == "gate/up":
                pack = partial(self.kernels.pack_gated_linear, activation="silu")
            calls = [partial(pack(weight, bias=None), x) for weight in weights]
            about_s = max(2 * n * k / 4e12, 2 * rows * n * k / 7e14)
            amount = (
                Amount(2 * n * k, "B") if rows < PROMPT_ROWS else Amount(2 * rows * n * k, "FLOP")
            )
            total += self.seconds(f"{rows:5} x {n} x {k}", calls, about_s, amount)
        return total

    def attention(self, model: Model, num_reqs: int) -> float:
        """Return the bytes per second at which decode attention reads keys and values."""
        sizes = Sizes(model.num_q, NUM_KV_HEADS, HEAD_DIM, 16, BF16)
        case = Case("decode", num_reqs, CONTEXT, 1)
        num_layers = 2 + int(3e8 / sizes.kv_bytes(case))
        context, table = make_context(sizes, case, num_layers)
        config = AttentionConfig(
            context=context, num_qo_heads=model.num_q, num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM, dtype=BF16, device=DEVICE,
            layers=(LayerAttention(HEAD_DIM**-0.5),) * num_layers,
            max_running_reqs=num_reqs, max_seq_len=CONTEXT,
        )  # fmt: skip
        backend, batch = layout_factory(self.loader, None)(config), make_batch(case, table)
        q = randn(num_reqs, model.num_q, HEAD_DIM)
        backend.prepare_for_capture(batch)
        calls = [partial(backend.forward, q, i, batch) for i in range(num_layers)]
        about_s = sizes.kv_bytes(case) / 4e12
        amount = Amount(sizes.kv_bytes(case), "B")
        seconds = self.seconds(f"attention, {num_reqs} x {CONTEXT}", calls, about_s, amount)
        return amount.size / seconds


def between(points: Mapping[int, float], at: int) -> float:
    """Return the value at a number, on the line of the two ``points`` around it, or nearest."""
    known = sorted(points)
    i = max(1, min(bisect_left(known, at), len(known) - 1))
    low, high = known[i - 1], known[i]
    part = (at - low) / (high - low)
    return points[low] * (1 - part) + points[high] * part


def steps(num_in: list[int], num_out: list[int]) -> Iterator[tuple[int, int]]:
    """Yield requests and keys of each decode step, all prompts being done before the first."""
    for step in range(1, max(num_out)):
        lengths = [n + step for n, m in zip(num_in, num_out, strict=True) if step < m]
        yield len(lengths), sum(lengths)


def main() -> None:
    """Time everything and add it up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=tuple(_MODEL_OF), default="qwen3-14b")
    parser.add_argument("--seconds", type=float, default=0.5, help="that a call is timed for")
    args = parser.parse_args()
    require_gpus(parser)
    model, num_layers = MODELS[_MODEL_OF[args.shape]], SHAPES[args.shape]["num_hidden_layers"]
    with PowerMeter() as meter:
        bench = Bench(args.seconds, meter)
        bench.read()
        layers = {rows: bench.layer(model, rows) for rows in NUM_ROWS}
        prompt_s = bench.layer(model, PROMPT_ROWS) / PROMPT_ROWS
        rates = {n: bench.attention(model, n) for n in NUM_REQS}
    prompts, max_tokens = workload()
    num_in = [len(prompt) for prompt in prompts]
    key_bytes = 2 * NUM_KV_HEADS * HEAD_DIM * BF16.itemsize
    products = attention = 0.0
    for num_reqs, num_keys in steps(num_in, max_tokens):
        products += num_layers * between(layers, num_reqs)
        attention += num_layers * num_keys * key_bytes / between(rates, num_reqs)
    prefill = num_layers * sum(num_in) * prompt_s
    total = products + attention + prefill
    print(
        f"{args.shape}: prompts' products {prefill:.2f} s, decode products {products:.2f} s, "
        f"decode attention {attention:.2f} s: {sum(max_tokens) / total:,.0f} tokens/s at most"
    )


if __name__ == "__main__":
    main()
