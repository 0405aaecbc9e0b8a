"""Throughput and latency of the offline LLM on dummy weights, for the shapes of `SHAPES`.

    python -m benchmarks.offline --shape qwen3-0.6b
    python -m benchmarks.offline --shape qwen3-0.6b --rows batch1,batch64 --setting attn=fi

Rows (all with ``ignore_eos``; each after one warm-up of the same kind):

* ``offline``: mini-sglang's own workload: 256 requests, input and output lengths uniform in
  100 … 1024, seed 0, temperature 0.6; output tokens per second.
* ``batch1``: 128 in, 512 out, greedy; output tokens per second.
* ``batch64``: 64 × (512 in, 256 out), greedy, prefill included; output tokens per second.
* ``prefill``: 64 × 512 in, 1 out; prompt tokens per second.
* ``ttft``: one request of 128 tokens, 1 out; median milliseconds.

``start`` is the time from the start of this process until the engine is ready, and how much of it
is ``LLM(...)``; the rest is Python and its imports.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.shapes import SHAPES, write_shape
from minisgl import LLM, SamplingParams

Row = Callable[[LLM], dict[str, float]]


def timed(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> float:
    """Return the seconds that one call takes."""
    started = time.perf_counter()
    llm.generate(prompts, params, show_progress=False)
    return time.perf_counter() - started


def prompt(rng: random.Random, length: int) -> list[int]:
    """Make random token ids; no two prompts share a prefix worth caching."""
    return [rng.randrange(3, 10_000) for _ in range(length)]


def workload() -> tuple[list[list[int]], list[int]]:
    """Return the prompts of mini-sglang's workload, and how many tokens each is answered with."""
    rng = random.Random(0)
    prompts = [prompt(rng, rng.randint(100, 1024)) for _ in range(256)]
    return prompts, [rng.randint(100, 1024) for _ in prompts]


def offline(llm: LLM) -> dict[str, float]:
    """Run mini-sglang's workload."""
    prompts, max_tokens = workload()
    params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n) for n in max_tokens]
    timed(llm, prompts[:8], [SamplingParams(max_tokens=8, ignore_eos=True)] * 8)
    seconds = timed(llm, prompts, params)
    return {"output_tok_s": sum(max_tokens) / seconds, "seconds": seconds}


def fixed(num_reqs: int, num_in: int, num_out: int, runs: int) -> Row:
    """Make a row of equal requests: the median of several runs."""

    def row(llm: LLM) -> dict[str, float]:
        rng = random.Random(f"{num_reqs} {num_in} {num_out}")  # rows must not share prefixes
        params = [SamplingParams(max_tokens=num_out, ignore_eos=True)] * num_reqs
        times = [
            timed(llm, [prompt(rng, num_in) for _ in range(num_reqs)], params)
            for _ in range(runs + 1)
        ][1:]
        seconds = statistics.median(times)
        return {
            "output_tok_s": num_reqs * num_out / seconds,
            "prompt_tok_s": num_reqs * num_in / seconds,
            "ms_per_output_token": 1e3 * seconds / num_out,
            "seconds": seconds,
        }

    return row


ROWS: dict[str, Row] = {
    "offline": offline,
    "batch1": fixed(1, 128, 512, 3),
    "batch64": fixed(64, 512, 256, 2),
    "prefill": fixed(64, 512, 1, 3),
    "ttft": fixed(1, 128, 1, 9),
}


def process_seconds() -> float:
    """Return for how long this process has lived, to 10 ms; see proc(5)."""
    begin = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    now = float(Path("/proc/uptime").read_text().split()[0])
    return now - int(begin) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Parse arguments, run the rows and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--setting", action="append", default=[], help="name=value of LLM(...)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    settings = dict(item.split("=", 1) for item in args.setting)
    values = {k: int(v) if v.isdigit() else v for k, v in settings.items()}
    overlap = {"overlap": values.pop("overlap") != "off"} if "overlap" in values else {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_shape(args.shape, Path(folder))
        started = time.perf_counter()
        llm = LLM(str(model), dummy_weight=True, **values, **overlap)
        start = {"process_s": process_seconds(), "llm_s": time.perf_counter() - started}
        results: dict[str, dict[str, float]] = {"start": start}
        for name in args.rows.split(","):
            results[name] = ROWS[name](llm)
            figures = ", ".join(f"{k} {v:,.2f}" for k, v in results[name].items())
            print(f"{args.shape:14} {name:8} {figures}", flush=True)
        figures = ", ".join(f"{k} {v:.2f}" for k, v in start.items())
        print(f"{args.shape:14} start    {figures}")
        llm.shutdown()
    if args.json:
        args.json.write_text(json.dumps({"shape": args.shape, "settings": settings} | results))


if __name__ == "__main__":
    main()
