"""Time the ops of kernel set ``cuda`` on a GPU beside torch and FlashInfer.

    python -m benchmarks.gpu_kernels                     # all tables, about a minute
    python -m benchmarks.gpu_kernels --only sampling

Every figure is microseconds per call in a replayed CUDA graph of many calls, as in a captured
decode step; the calls of a graph go round several sets of buffers, so that nothing larger than a
few megabytes comes from the L2 cache. ``floor`` is the bytes of one call over ``--bandwidth``.
Products with weights, and layers made of all of these, are in `benchmarks.gpu_linear`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.devices import require_gpus
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
from minisgl_kernels_cuda.settings import CudaKernelSettings

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
    parser.add_argument("--only", default="row_ops,qkv,sampling")
    parser.add_argument("--flashinfer", action="store_true")
    parser.add_argument("--bandwidth", type=float, default=4.2e12, help="bytes per second")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    require_gpus(parser)
    bench = Bench(args.bandwidth, args.flashinfer)
    sections: dict[str, Callable[[], None]] = {
        "row_ops": bench.row_ops,
        "qkv": bench.qkv,
        "sampling": bench.sampling,
    }
    for name in args.only.split(","):
        sections[name]()
    show(bench.lines)
    if args.json:
        args.json.write_text(json.dumps([line._asdict() for line in bench.lines], indent=1))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
