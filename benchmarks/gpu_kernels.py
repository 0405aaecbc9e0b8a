"""Time the ops of kernel set ``cuda`` on a GPU beside torch, cuBLAS and FlashInfer.

    python -m benchmarks.gpu_kernels                     # all tables, about a minute
    python -m benchmarks.gpu_kernels --only linear --tune

Every figure is microseconds per call in a replayed CUDA graph of many calls, as in a captured
decode step; the calls of a graph go round several sets of buffers, so that nothing larger than a
few megabytes comes from the L2 cache. ``floor`` is the bytes of one call over ``--bandwidth``.
``chain`` is a decode layer without attention, 28 layers in one graph.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernel_timing import (
    BF16,
    DEVICE,
    Call,
    Line,
    copies,
    qkv_inputs,
    randn,
    sampling_inputs,
    show,
    time_graph,
)
from minisgl.ops import torch_ops
from minisgl.ops.contract import KernelConfig
from minisgl.ops.sampling import sample
from minisgl.ops.table import compose_qk_norm_rope_store
from minisgl_kernels_cuda.backend import CudaKernelSet
from minisgl_kernels_cuda.compiler import Compiler
from minisgl_kernels_cuda.driver import DeviceLoader, device_size
from minisgl_kernels_cuda.linear import LinearKernels, Plan
from minisgl_kernels_cuda.settings import CudaKernelSettings, cache_folder

LINEARS = {
    "0.6b": [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)],
    "14b": [(7168, 5120), (5120, 5120), (34816, 5120), (5120, 17408), (151936, 5120)],
}
Calls = tuple[Call, Call, Call | None]
Ops = Mapping[str, Callable[..., Any]]  # ops have different signatures


class Bench:
    """Runs the sections and keeps their lines."""

    def __init__(self, bandwidth: float, has_flashinfer: bool) -> None:
        """Load the kernels."""
        self.ops = CudaKernelSet(KernelConfig(DEVICE, BF16, CudaKernelSettings())).ops()
        self.bandwidth = bandwidth
        self.has_flashinfer = has_flashinfer
        self.lines: list[Line] = []

    def add(
        self,
        op: str,
        shape: str,
        num_bytes: float,
        make: Callable[[], Calls],
    ) -> None:
        """Time ours, torch's and FlashInfer's; ``make`` gives one set of them."""
        sets = [make() for _ in range(copies(num_bytes))]
        ours = time_graph([s[0] for s in sets])
        theirs = time_graph([s[1] for s in sets], 16)
        third = [s[2] for s in sets if s[2] is not None]
        fi = time_graph(third) if third and self.has_flashinfer else None
        floor = num_bytes / self.bandwidth * 1e6
        self.lines.append(Line(op, shape, ours, floor, theirs, fi))
        print(self.lines[-1], flush=True)

    def row_ops(self) -> None:
        """Norms and activations at decode and prefill sizes."""
        for rows, hidden in (
            (1, 1024),
            (64, 1024),
            (256, 1024),
            (8192, 1024),
            (1, 5120),
            (256, 5120),
        ):
            self._norms(rows, hidden)
        for rows, half in ((1, 3072), (64, 3072), (256, 3072), (8192, 3072), (1, 17408)):
            self._silu(rows, half)

    def _norms(self, rows: int, hidden: int) -> None:
        def rms() -> Calls:
            x, w = randn(rows, hidden), randn(hidden)
            return (
                lambda: self.ops["rms_norm"](x, w, 1e-6),
                lambda: F.rms_norm(x, (hidden,), w, 1e-6),
                (lambda: flashinfer_module("norm").rmsnorm(x, w, 1e-6)),
            )

        def fused() -> Calls:
            x, r, w = randn(rows, hidden), randn(rows, hidden), randn(hidden)
            return (
                lambda: self.ops["fused_add_rms_norm"](x, r, w, 1e-6),
                lambda: torch_ops.fused_add_rms_norm(x, r, w, 1e-6),
                (lambda: flashinfer_module("norm").fused_add_rmsnorm(x, r, w, 1e-6)),
            )

        self.add("rms_norm", f"{rows}x{hidden}", 4.0 * rows * hidden, rms)
        self.add("fused_add_rms_norm", f"{rows}x{hidden}", 8.0 * rows * hidden, fused)

    def _silu(self, rows: int, half: int) -> None:
        def silu() -> Calls:
            x = randn(rows, 2 * half)
            return (
                lambda: self.ops["silu_and_mul"](x),
                lambda: torch_ops.silu_and_mul(x),
                lambda: flashinfer_silu(x),
            )

        self.add("silu_and_mul", f"{rows}x{half}", 6.0 * rows * half, silu)

    def qkv(self) -> None:
        """What is between the q/k/v product and attention; embedding and store alone."""
        for rows, num_q in ((1, 16), (64, 16), (256, 16), (8192, 16), (64, 40)):
            self._qkv(rows, num_q, 8)
        for rows in (1, 256, 8192):
            self._moves(rows)

    def _qkv(self, rows: int, num_q: int, num_kv: int) -> None:
        composed = compose_qk_norm_rope_store(
            torch_ops.rms_norm, torch_ops.rope, torch_ops.store_kv
        )

        def stage() -> Calls:
            qkv, inputs = randn(rows, (num_q + 2 * num_kv) * 128), qkv_inputs(rows, num_q, num_kv)
            return (
                lambda: self.ops["qk_norm_rope_store"](qkv, inputs),
                lambda: composed(qkv, inputs),
                None,
            )

        num_bytes = 4.0 * rows * (num_q + 2 * num_kv) * 128
        self.add("qk_norm_rope_store", f"{rows}x({num_q}+2*{num_kv})", num_bytes, stage)

    def _moves(self, rows: int) -> None:
        weight = randn(151936, 1024)

        def lookup() -> Calls:
            ids = torch.randint(151936, (rows,), device=DEVICE, dtype=torch.int32)
            return (
                lambda: self.ops["embedding"](ids, weight, 0),
                lambda: torch_ops.embedding(ids, weight, 0),
                None,
            )

        def store() -> Calls:
            k, v = randn(rows, 8, 128), randn(rows, 8, 128)
            pools = randn(rows, 8, 128), randn(rows, 8, 128)
            slots = torch.randperm(rows, device=DEVICE)
            return (
                lambda: self.ops["store_kv"](k, v, *pools, slots),
                lambda: torch_ops.store_kv(k, v, *pools, slots),
                None,
            )

        self.add("embedding", f"{rows}x1024", 4.0 * rows * 1024, lookup)
        self.add("store_kv", f"{rows}x8x128", 8.0 * rows * 1024, store)

    def sampling(self) -> None:
        """The sampler by kinds of rows."""
        kinds: dict[str, dict[str, float]] = {
            "greedy": {"temperature": 0.0},
            "sampled": {"temperature": 0.6},
            "top_k 50 top_p .9": {"temperature": 0.6, "top_k": 50, "top_p": 0.9},
            "top_p .9": {"temperature": 0.6, "top_p": 0.9},
            "top_k 1000": {"temperature": 0.6, "top_k": 1000},
            "min_p .05": {"temperature": 0.6, "min_p": 0.05},
        }
        for rows in (1, 64, 256):
            for kind, params in kinds.items():
                self._sample(rows, kind, params, 3.0)
        self._sample(256, "top_p .9 flat", kinds["top_p .9"], 0.1)

    def _sample(self, rows: int, kind: str, params: dict[str, float], spread: float) -> None:
        inputs = sampling_inputs(rows, **params)
        is_greedy = kind == "greedy"

        def one() -> Calls:
            logits = randn(rows, 151936) * spread
            return (
                lambda: self.ops["sample"](logits, inputs, is_greedy),
                lambda: sample(logits, inputs, is_greedy),
                (lambda: flashinfer_sample(logits)) if kind == "sampled" else None,
            )

        self.add(f"sample {kind}", f"{rows}x151936", 2.0 * rows * 151936, one)

    def linear(self, rows_list: Sequence[int], models: Sequence[str]) -> None:
        """Products of few rows beside cuBLAS."""
        for n, k in (shape for model in models for shape in LINEARS[model]):
            weights = [randn(n, k) for _ in range(copies(2.0 * n * k))]
            packed = [self.ops["pack_linear"](w, None) for w in weights]
            library = [library_linear(w, None) for w in weights]
            for rows in rows_list:
                x = randn(rows, k)
                ours = time_graph([partial(p, x) for p in packed], 24)
                cublas = time_graph([partial(p, x) for p in library], 24)
                floor = 2.0 * (n * k + rows * (n + k)) / self.bandwidth * 1e6
                self.lines.append(Line("linear", f"{rows}x{n}x{k}", ours, floor, cublas))
                print(self.lines[-1], flush=True)

    def tune(self, rows_list: Sequence[int], models: Sequence[str]) -> None:
        """Print the times of the best forms of the few-row product."""
        properties = torch.cuda.get_device_properties(DEVICE)
        compiler = Compiler(f"sm_{properties.major}{properties.minor}", cache_folder(""))
        size = device_size(DEVICE)
        kernels = TunedKernels(DeviceLoader(DEVICE, compiler, True), BF16, size, 16)
        for n, k in (shape for model in models for shape in LINEARS[model]):
            weights = [randn(n, k) for _ in range(copies(2.0 * n * k))]
            for rows in rows_list:
                x, times = randn(rows, k), {}
                for plan in plans(n, k, size.num_sms):
                    kernels.fixed = plan
                    packed = [kernels.pack_linear(w, None) for w in weights]
                    times[plan] = time_graph([partial(p, x) for p in packed], 24)
                best = sorted(times.items(), key=lambda item: item[1])[:4]
                text = "  ".join(f"{p.groups}x{p.num_blocks}={us:.2f}" for p, us in best)
                print(f"tune {rows}x{n}x{k}: {text}", flush=True)

    def chain(self) -> None:
        """A decode layer of the 0.6B shape without attention."""
        for rows in (1, 8, 16, 64):
            results = {
                "pdl": chain_time(self.ops, rows),
                "no pdl": chain_time(
                    CudaKernelSet(KernelConfig(DEVICE, BF16, CudaKernelSettings(pdl="off"))).ops(),
                    rows,
                ),
                "cublas": chain_time({**self.ops, "pack_linear": library_linear}, rows),
            }
            print(f"chain {rows} rows, us a layer:", {k: round(v, 2) for k, v in results.items()})
            floor = 2.0 * (4096 + 2048 + 6144 + 3072) * 1024 / self.bandwidth * 1e6
            self.lines.append(
                Line("layer, no attention", f"{rows}", results["pdl"], floor, results["cublas"])
            )


class TunedKernels(LinearKernels):
    """Kernels whose plan is set from outside."""

    fixed: Plan

    def plan(self, n: int, k: int) -> Plan:
        """Return the plan that is tried."""
        del n, k
        return self.fixed

    def row_limit(self, weight: Tensor, bias: Tensor | None) -> int:
        """Try rows that the library would get."""
        del weight, bias
        return 16


def plans(n: int, k: int, num_sms: int) -> list[Plan]:
    """Return forms that may be good."""
    found = []
    for groups in (1, 2):
        tiles = -(-n // (8 * groups))
        found += [Plan(groups, min(tiles, num_sms * i)) for i in (1, 2, 3, 4, 6)]
        found += [Plan(groups, tiles)] if tiles < num_sms * 16 or k <= 1024 else []
    return found


def library_linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Multiply by cuBLAS."""
    return lambda x: F.linear(x, weight, bias)


def chain_time(ops: Ops, rows: int) -> float:
    """Return microseconds of one of 28 layers."""
    num_layers, hidden = 28, 1024
    pack = ops["pack_linear"]
    shapes = LINEARS["0.6b"][:4]
    layers = [[pack(randn(n, k) / k**0.5, None) for n, k in shapes] for _ in range(num_layers)]
    scale = randn(hidden)
    inputs = qkv_inputs(rows, 16, 8)
    x0, residual = randn(rows, hidden), randn(rows, hidden)

    def step() -> None:
        x, total = x0, residual
        for qkv, o, gate_up, down in layers:
            x, total = ops["fused_add_rms_norm"](x, total, scale, 1e-6)
            q = ops["qk_norm_rope_store"](qkv(x), inputs)
            x, total = ops["fused_add_rms_norm"](o(q.flatten(1)), total, scale, 1e-6)
            x = down(ops["silu_and_mul"](gate_up(x)))

    return time_graph([step], 1) / num_layers


def flashinfer_module(name: str) -> Any:  # no annotations of its own
    """Import a module of FlashInfer, which may be missing."""
    return import_module(f"flashinfer.{name}")


def flashinfer_silu(x: Tensor) -> Tensor:
    """Compute FlashInfer's activation."""
    out: Tensor = flashinfer_module("activation").silu_and_mul(x)
    return out


def flashinfer_sample(logits: Tensor) -> Tensor:
    """Softmax and sampling as FlashInfer does them."""
    fi = flashinfer_module("sampling")
    out: Tensor = fi.sampling_from_probs(fi.softmax(logits, temperature=0.6), seed=1, offset=2)
    return out


def main() -> None:
    """Run the sections that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="row_ops,qkv,sampling,linear,chain")
    parser.add_argument("--rows", default="1,8,16")
    parser.add_argument("--models", default="0.6b,14b")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--flashinfer", action="store_true")
    parser.add_argument("--bandwidth", type=float, default=4.2e12, help="bytes per second")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    bench = Bench(args.bandwidth, args.flashinfer)
    rows = [int(r) for r in args.rows.split(",")]
    sections: dict[str, Callable[[], None]] = {
        "row_ops": bench.row_ops,
        "qkv": bench.qkv,
        "sampling": bench.sampling,
        "linear": lambda: bench.linear(rows, args.models.split(",")),
        "chain": bench.chain,
    }
    for name in args.only.split(","):
        sections[name]()
    if args.tune:
        bench.tune(rows, args.models.split(","))
    show(bench.lines)
    if args.json:
        args.json.write_text(json.dumps([line._asdict() for line in bench.lines], indent=1))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
