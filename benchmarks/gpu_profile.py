"""Where the time of a decode step or of a prefill goes on a GPU.

    python -m benchmarks.gpu_profile --shape qwen3-0.6b --batches 1,64,256
    python -m benchmarks.gpu_profile --shape qwen3-0.6b --prefill 64x512,1x128

Prints, per batch size, the wall time of a step (or of the whole prefill), the share in which the
device computes, and the kernels by their time. The rest is gaps: launches, and the host.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.devices import require_gpus
from benchmarks.shapes import SHAPES, write_shape
from minisgl import LLM, SamplingParams

NUM_STEPS = 64


def generate(llm: LLM, batch: int, context: int, num_tokens: int, temperature: float) -> float:
    """Run ``batch`` fresh prompts of ``context`` tokens and return the seconds that it took."""
    rng = random.Random(f"{batch} {num_tokens} {time.perf_counter()}")
    prompts = [[rng.randrange(3, 10_000) for _ in range(context)] for _ in range(batch)]
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=temperature)
    started = time.perf_counter()
    llm.generate(prompts, params, show_progress=False)
    return time.perf_counter() - started


def step_seconds(llm: LLM, batch: int, context: int, temperature: float) -> float:
    """Return the seconds that a decode step takes: a long run less a run of the prefill alone."""
    generate(llm, batch, context, 8, temperature)
    long_s = generate(llm, batch, context, NUM_STEPS + 1, temperature)
    return (long_s - generate(llm, batch, context, 1, temperature)) / NUM_STEPS


def kernel_us(llm: LLM, batch: int, context: int, temperature: float) -> dict[str, float]:
    """Return microseconds per decode step by kernel, those of the prefill taken off."""
    totals: dict[str, float] = defaultdict(float)
    for num_tokens, sign in ((NUM_STEPS + 1, 1), (1, -1)):
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            generate(llm, batch, context, num_tokens, temperature)
            torch.cuda.synchronize()
        for event in profiler.key_averages():
            totals[event.key] += sign * event.self_device_time_total / NUM_STEPS
    return totals


def profile_prefill(llm: LLM, batch: int, context: int) -> tuple[float, dict[str, float]]:
    """Return the median microseconds of a prefill, and microseconds by kernel in one."""
    walls = [generate(llm, batch, context, 1, 0.0) for _ in range(9)][2:]
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        generate(llm, batch, context, 1, 0.0)
        torch.cuda.synchronize()
    totals = {event.key: event.self_device_time_total for event in profiler.key_averages()}
    return 1e6 * statistics.median(walls), totals


def print_kernels(title: str, wall_us: float, totals: dict[str, float]) -> None:
    """Print the longest kernels under a line with the sums."""
    print(f"\n{title}: {wall_us:.0f} us, kernels {sum(totals.values()):.0f}")
    for name, us in sorted(totals.items(), key=lambda item: -item[1])[:18]:
        print(f"  {us:9.1f} us  {name[:110]}")


def main() -> None:
    """Parse arguments and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--batches", default="1,64,256")
    parser.add_argument("--prefill", help="requests x tokens, such as 64x512,1x128; no decode")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--setting", action="append", default=[], help="name=value of LLM(...)")
    args = parser.parse_args()
    require_gpus(parser)
    values = {
        k: int(v) if v.isdigit() else v for k, v in (item.split("=", 1) for item in args.setting)
    }
    with profile(activities=[ProfilerActivity.CUDA]):
        torch.zeros(1, device="cuda")  # graphs captured before the first profile are not traced
    with tempfile.TemporaryDirectory() as folder:
        model = write_shape(args.shape, Path(folder))
        with LLM(str(model), dummy_weight=True, **values) as llm:
            for sizes in args.prefill.split(",") if args.prefill else ():
                batch, context = map(int, sizes.split("x"))
                wall_us, totals = profile_prefill(llm, batch, context)
                print_kernels(f"{args.shape} prefill of {sizes}", wall_us, totals)
            for batch in () if args.prefill else map(int, args.batches.split(",")):
                step_us = 1e6 * step_seconds(llm, batch, args.context, args.temperature)
                totals = kernel_us(llm, batch, args.context, args.temperature)
                print_kernels(f"{args.shape} decode step, batch {batch}", step_us, totals)


if __name__ == "__main__":
    main()
