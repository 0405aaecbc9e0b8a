"""Runs ``minisgl bench serve``: sends a workload, and reports times and throughput."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minisgl.errors import SettingsError
from minisgl.plugin.commands import CommandContext
from minisgl_server.bench.base_url import (
    BaseUrl,
    check_key,
    check_server,
    first_model,
    parse_base_url,
)
from minisgl_server.bench.connection_pool import ConnectionPool
from minisgl_server.bench.flags import check_flags
from minisgl_server.bench.http_stream import Timing, time_completion
from minisgl_server.bench.plot import check_plot, write_plot
from minisgl_server.bench.workload import Task, random_tasks, shared_prefix_tasks, trace_tasks

_PERCENTILES = (50, 90, 99)
_NUM_REQUESTS = 100


def run(context: CommandContext) -> int:
    """Load a server and print what it did.

    Returns:
        1 when requests failed, else 0.

    Raises:
        SettingsError: A flag is wrong, or there is no server.
    """
    arguments = context.arguments
    check_flags(arguments)
    check_key(arguments.api_key)
    url = parse_base_url(arguments.url)
    tasks = _tasks(arguments)
    if arguments.plot:
        check_plot(Path(arguments.plot))
    check_server(url)
    model = arguments.model or first_model(url, arguments.api_key)
    start = time.perf_counter()
    timings = asyncio.run(_send_all(arguments, url, model, tasks))
    report = summarize(timings, time.perf_counter() - start, arguments)
    sys.stdout.write(json.dumps(report, indent=2) + "\n" if arguments.json else table(report))
    for error in sorted({timing.error for timing in timings if timing.error})[:5]:
        sys.stderr.write(f"minisgl: {_one_line(error)}\n")
    if arguments.plot:  # last: what was measured is not lost when this fails
        rate = f"{report['output_tokens_per_s']} output tokens/s"
        title = f"{model}: {report['num_requests']} requests in {report['seconds']} s, {rate}"
        write_plot(Path(arguments.plot), timings, title)
    return 1 if report["num_failed"] else 0


def summarize(timings: Sequence[Timing], seconds: float, arguments: Namespace) -> dict[str, Any]:
    """Work out rates and percentiles.

    Args:
        timings: Of all requests.
        seconds: That the whole run took.
        arguments: With ``goodput_ttft_s`` and ``goodput_itl_s``, limits or ``None``.

    Returns:
        Plain numbers, for JSON; times in milliseconds.
    """
    good = [timing for timing in timings if not timing.error]
    gaps = [gap for timing in good for gap in timing.gaps_s]
    num_output = sum(timing.num_output_tokens for timing in good)
    num_prompt = sum(timing.num_prompt_tokens for timing in good)
    return {
        "num_requests": len(timings),
        "num_failed": len(timings) - len(good),
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(good) / seconds, 3),
        "prompt_tokens_per_s": round(num_prompt / seconds, 1),
        "output_tokens_per_s": round(num_output / seconds, 1),
        "goodput_requests_per_s": round(
            sum(_is_within(timing, arguments) for timing in good) / seconds, 3
        ),
        "ttft_ms": _spread([timing.first_token_s for timing in good]),
        "itl_ms": _spread(gaps),
        "e2e_ms": _spread([timing.total_s for timing in good]),
    }


def table(report: dict[str, Any]) -> str:  # plain numbers
    """Write a report for people."""
    lines = [f"{name:<24} {value:>12}" for name, value in report.items() if type(value) is not dict]
    columns = ["mean", *(f"p{p}" for p in _PERCENTILES)]
    lines += ["", f"{'':<10}" + "".join(f"{column:>12}" for column in columns)]
    for name in ("ttft_ms", "itl_ms", "e2e_ms"):
        values = "".join(f"{report[name].get(column, 0):>12.2f}" for column in columns)
        lines.append(f"{name:<10}{values}")
    return "\n".join(lines) + "\n"


def _tasks(arguments: Namespace) -> list[Task]:
    if arguments.trace is not None:
        tasks = trace_tasks(Path(arguments.trace), arguments.num_requests, arguments.max_tokens)
        if not tasks:
            raise SettingsError(f"--trace {arguments.trace}: holds no request")
        return tasks
    num = _NUM_REQUESTS if arguments.num_requests is None else arguments.num_requests
    words = arguments.prompt_words
    if arguments.shared_prefixes:
        return shared_prefix_tasks(
            num, words, arguments.max_tokens, arguments.seed, arguments.shared_prefixes
        )
    return random_tasks(num, words, arguments.max_tokens, arguments.seed)


async def _send_all(
    arguments: Namespace, url: BaseUrl, model: str, tasks: Sequence[Task]
) -> list[Timing]:
    """Send every task: as it comes (open loop), or so many at a time (closed loop)."""
    gate = asyncio.Semaphore(arguments.concurrency or len(tasks))
    rng = random.Random(arguments.seed)

    async def send(pool: ConnectionPool, task: Task) -> Timing:
        async with gate:
            body = {
                "model": model,
                "prompt": task.prompt,
                "max_tokens": task.max_tokens,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            } | ({"ignore_eos": True} if arguments.ignore_eos else {})
            return await time_completion(pool, body, arguments.api_key, arguments.request_timeout_s)

    running = []
    start_s = time.perf_counter()
    async with ConnectionPool(url) as pool:
        for task in tasks:
            if task.arrival_s is not None:
                await asyncio.sleep(start_s + task.arrival_s - time.perf_counter())
            running.append(asyncio.create_task(send(pool, task)))
            if arguments.request_rate is not None and task.arrival_s is None:
                await asyncio.sleep(rng.expovariate(arguments.request_rate))
        return list(await asyncio.gather(*running))


def _one_line(text: str) -> str:
    """Keep what a server says from breaking lines or steering the terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _is_within(timing: Timing, arguments: Namespace) -> bool:
    """Whether a request kept the limits that make it count for goodput."""
    first, gap = arguments.goodput_ttft_s, arguments.goodput_itl_s
    gaps = timing.gaps_s
    mean_gap = sum(gaps) / len(gaps) if gaps else 0.0
    return (first is None or timing.first_token_s <= first) and (gap is None or mean_gap <= gap)


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return mean and percentiles in milliseconds."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    spread = {"mean": 1000 * sum(ordered) / len(ordered)}
    for percentile in _PERCENTILES:
        index = min(len(ordered) - 1, -(-percentile * len(ordered) // 100) - 1)
        spread[f"p{percentile}"] = 1000 * ordered[index]
    return {name: round(value, 3) for name, value in spread.items()}
