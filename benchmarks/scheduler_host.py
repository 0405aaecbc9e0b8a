"""Host time of one decode step: all of the scheduler's work, with an engine that costs nothing.

    python benchmarks/scheduler_host.py [--page-size N] [--cache NAME] [--profile]

Per batch size, the requests are prefilled first and then timed step by step: receiving nothing,
bookkeeping, pages, arrays for the engine, results, and the one message per step. The medians are
what counts; the engine's own packing, sampling and detokenizing are not in them.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import statistics
import time
from collections.abc import Callable

import numpy as np

from minisgl.engine.contract import EngineLimits
from minisgl.kvcache.contract import CacheConfig, PrefixCache
from minisgl.kvcache.naive import NaiveCache
from minisgl.kvcache.radix import RadixCache
from minisgl.message.types import UserMsg
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.contract import PolicyConfig
from minisgl.scheduler.io import OfflineIO
from minisgl.scheduler.policy import FcfsPolicy
from minisgl.scheduler.scheduler import Scheduler
from minisgl.testing.fake_engine import InstantEngine

PROMPT_LEN = 64
CACHES: dict[str, Callable[[CacheConfig], PrefixCache]] = {"radix": RadixCache, "naive": NaiveCache}


def build(args: argparse.Namespace, batch_size: int) -> tuple[Scheduler, OfflineIO]:
    """Make a scheduler whose ``batch_size`` requests are all decoding."""
    max_len = PROMPT_LEN + 2 * args.steps + 64
    limits = EngineLimits(
        num_pages=batch_size * (-(-max_len // args.page_size)) + 1,
        page_size=args.page_size,
        max_running_reqs=batch_size,
        max_seq_len=max_len,
        vocab_size=1000,
        eos_token_ids=frozenset([0]),
    )
    io = OfflineIO()
    config = SchedulerConfig(is_overlap=not args.no_overlap, max_prefill_length=10**6)
    cache = CACHES[args.cache](CacheConfig(args.page_size))
    engine = InstantEngine(limits)
    scheduler = Scheduler(engine, cache, FcfsPolicy(PolicyConfig()), io, config)
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=2 * args.steps + 50)
    prompts = rng.integers(1, 1000, (batch_size, PROMPT_LEN), dtype=np.int32)
    io.put(UserMsg(uid, prompt, params) for uid, prompt in enumerate(prompts))
    while scheduler.stats().num_decode_steps < 20:
        scheduler.step()
    assert scheduler.stats().num_running == batch_size
    io.take()
    return scheduler, io


def measure(args: argparse.Namespace, batch_size: int) -> list[float]:
    """Return the microseconds of each step."""
    scheduler, io = build(args, batch_size)
    times = []
    for _ in range(args.steps):
        start_s = time.perf_counter()
        scheduler.step()
        times.append(1e6 * (time.perf_counter() - start_s))
        io.take()
    return times


def profile(args: argparse.Namespace, batch_size: int) -> None:
    """Print where the time goes."""
    scheduler, io = build(args, batch_size)
    profiler = cProfile.Profile()
    for _ in range(args.steps):
        profiler.enable()
        scheduler.step()
        profiler.disable()
        io.take()
    print(f"\nbatch {batch_size}, {args.steps} steps")
    pstats.Stats(profiler).sort_stats("tottime").print_stats(20)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16, 64, 256, 512])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--cache", choices=sorted(CACHES), default="radix")
    parser.add_argument("--no-overlap", action="store_true")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    gc.collect()
    gc.freeze()
    print(f"{args.cache}, page size {args.page_size}, {args.steps} steps, microseconds per step")
    print(f"{'batch':>6} {'median':>8} {'p10':>8} {'p90':>8} {'per request':>12}")
    for batch_size in args.batch_sizes:
        times = measure(args, batch_size)
        deciles = statistics.quantiles(times, n=10)
        median = statistics.median(times)
        print(
            f"{batch_size:>6} {median:>8.1f} {deciles[0]:>8.1f} {deciles[-1]:>8.1f} "
            f"{median / batch_size:>12.2f}"
        )
    if args.profile:
        for batch_size in args.batch_sizes:
            profile(args, batch_size)


if __name__ == "__main__":
    main()
