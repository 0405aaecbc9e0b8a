"""One model over several GPUs: speed, and the share of a decode step that collectives take.

    python -m benchmarks.gpu_tp --shape qwen3-14b --tp 2 --json tp2.json
    python -m benchmarks.gpu_tp --shape qwen3-14b --tp 2 --rows batch1 --setting comm=torch

Rows are those of `benchmarks.offline`, with dummy weights; ``batch1`` is shorter here (128 in,
256 out). ``collectives`` are kernels of rank 0 by their names, in a decode step of 1 and of 64
requests; the time in which they wait for the other rank is part of theirs.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.devices import require_gpus
from benchmarks.gpu_profile import kernel_us
from benchmarks.offline import ROWS, Row, fixed
from benchmarks.shapes import SHAPES, write_shape
from minisgl import LLM

COLLECTIVES = re.compile("nccl|sum_at_once|sum_by_parts|sum_add_norm", re.IGNORECASE)
CONTEXT = 128


def share_of_collectives(llm: LLM, batch: int) -> dict[str, float]:
    """Profile decode steps and return microseconds of a step."""
    kernels = kernel_us(llm, batch, CONTEXT, 0.0)
    ours = {name: us for name, us in kernels.items() if COLLECTIVES.search(name)}
    total, part = sum(kernels.values()), sum(ours.values())
    for name, us in sorted(ours.items(), key=lambda item: -item[1]):
        print(f"  {us:9.1f} us  {name[:100]}")
    return {"kernels_us": total, "collectives_us": part, "share": part / total}


def rows_of(names: str) -> Mapping[str, Row]:
    """Return the rows to run."""
    rows = ROWS | {"batch1": fixed(1, 128, 256, 2)}
    return {name: rows[name] for name in names.split(",") if name}


def main() -> None:
    """Parse arguments, run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-14b")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--rows", default="batch1,offline")
    parser.add_argument("--batches", default="1,64", help="decode batches to profile")
    parser.add_argument("--setting", action="append", default=[], help="name=value of LLM(...)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    require_gpus(parser, args.tp)
    values = {
        k: int(v) if v.isdigit() else v for k, v in (item.split("=", 1) for item in args.setting)
    }
    with profile(activities=[ProfilerActivity.CUDA]):
        torch.zeros(1, device="cuda")  # graphs captured before the first profile are not traced
    results: dict[str, dict[str, float]] = {}
    title = f"{args.shape} tp {args.tp}"

    def keep(name: str, figures: dict[str, float]) -> None:
        """Print a line, and write down what there is, in case the next one does not end."""
        results[name] = figures
        report(title, name, figures)
        if args.json:
            args.json.write_text(json.dumps({"shape": args.shape, "tp": args.tp} | results))

    with tempfile.TemporaryDirectory() as folder:
        model = write_shape(args.shape, Path(folder))
        started = time.perf_counter()
        with LLM(str(model), dummy_weight=True, tp=args.tp, **values) as llm:
            keep("start", {"s": time.perf_counter() - started})
            for name, row in rows_of(args.rows).items():
                keep(name, row(llm))
            for batch in map(int, filter(None, args.batches.split(","))):
                keep(f"step of {batch}", share_of_collectives(llm, batch))


def report(title: str, name: str, figures: Mapping[str, float]) -> None:
    """Print a line."""
    print(
        f"{title:18} {name:10}", ", ".join(f"{k} {v:,.2f}" for k, v in figures.items()), flush=True
    )


if __name__ == "__main__":
    main()
