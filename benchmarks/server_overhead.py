r"""What HTTP costs: tokens/s of concurrent streams against the offline LLM on the same requests.

On a CPU, and with dummy weights on a GPU:

    python -m benchmarks.server_overhead --model demo --concurrency 8 --rounds 3
    python -m benchmarks.server_overhead --shape qwen3-0.6b --prompt-tokens 512 --max-tokens 256 \
        --concurrency 64 --processes 8 --rounds 3

Both engines live at the same time and take turns, so that a busy machine slows both alike; the
rounds' medians are compared. Prompts are random tokens, new ones each round. A round prints:

* ``offline``, ``http``: output tokens per second, prefill included.
* ``first_token_ms``, ``gap_ms``: from a request to its first piece of text, and from each piece to
  the next; median and 99th percentile of all streams.
* ``tokens_per_piece``: more than 1 where the server sends the tokens of several steps together.
* ``cpu_...``: CPU seconds per second of each process of the server, and of one of the clients.
  A client near 1 is too slow for what it measures, and needs more ``--processes``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from benchmarks.shapes import SHAPES, write_shape
from benchmarks.stream_client import Prompt, StreamClients, Timing
from minisgl import LLM, SamplingParams

PAGE_SIZE = 16  # tokens; the least that an engine chooses by itself


def main() -> None:
    """Measure and print."""
    arguments = parse_arguments()
    # A pool that just holds all requests, with a page to spare for each, lets both engines fit on
    # one GPU, where each would take most of the memory for itself.
    num_tokens = arguments.prompt_tokens + arguments.max_tokens
    num_pages = arguments.concurrency * (num_tokens // PAGE_SIZE + 2)
    is_dummy = arguments.shape is not None
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_shape(arguments.shape, Path(folder))) if is_dummy else arguments.model
        command = [sys.executable, "-m", "minisgl", "serve", model, "--port=0"]
        command += [f"--num-pages={num_pages}", *["--dummy-weight"] * is_dummy]
        with (
            LLM(model, num_pages=num_pages, dummy_weight=is_dummy) as llm,
            subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server,
        ):
            try:
                rounds = run_rounds(llm, server, arguments)
            finally:
                server.terminate()
    medians = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    share = medians["http"] / medians["offline"]
    rounded = {name: round(value, 3) for name, value in {**medians, "share": share}.items()}
    print(json.dumps({**rounded, **vars(arguments)}))


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", default="demo")
    source.add_argument("--shape", choices=SHAPES, help="in place of a model; dummy weights")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--processes", type=int, default=1, help="clients that share the streams")
    parser.add_argument("--rounds", type=int, default=3, help="besides one that warms up")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    arguments = parser.parse_args()
    least = {"prompt_tokens": 1, "max_tokens": 2, "concurrency": 1, "processes": 1, "rounds": 1}
    for name, bound in least.items():
        if (value := getattr(arguments, name)) < bound:
            parser.error(f"--{name.replace('_', '-')} {value}: must be at least {bound}")
    if arguments.processes > arguments.concurrency:
        parser.error(
            f"--processes {arguments.processes}: must be at most --concurrency, "
            f"which is {arguments.concurrency}"
        )
    if arguments.shape:
        arguments.model = None
    return arguments


def run_rounds(
    llm: LLM, server: subprocess.Popen[str], arguments: argparse.Namespace
) -> list[dict[str, float]]:
    """Let both engines take turns, and return the figures of each round but the first."""
    host, port = wait_until_ready(server)
    rng = random.Random(arguments.seed)
    vocabulary = range(len(llm.tokenizer))
    rounds = []
    with StreamClients(host, port, arguments.processes) as clients:
        pids = server_pids(server.pid) | {"client": clients.pids[0]}
        for number in range(arguments.rounds + 1):
            prompts = [
                rng.choices(vocabulary, k=arguments.prompt_tokens)
                for _ in range(arguments.concurrency)
            ]
            figures = run_offline(llm, prompts, arguments.max_tokens)
            figures |= run_http(clients, pids, prompts, arguments.max_tokens)
            if number:  # the first round warms up
                rounds.append(figures)
            shown = ", ".join(f"{name} {value:,.2f}" for name, value in figures.items())
            print(f"round {number}: {shown}", flush=True)
    return rounds


def wait_until_ready(server: subprocess.Popen[str]) -> tuple[str, int]:
    """Return host and port once the server says them; until then, pass on what it says."""
    assert server.stderr is not None, "it is a pipe"
    for line in server.stderr:
        sys.stderr.write(line)
        if found := re.search(r"ready: serving .* at (\S+) \(", line):
            url = urlsplit(found[1])
            assert url.hostname is not None, "the server says it"
            assert url.port is not None, "the server says it"
            return url.hostname, url.port
    raise SystemExit("the server did not start")


def run_offline(llm: LLM, prompts: list[Prompt], max_tokens: int) -> dict[str, float]:
    """Run one batch."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, show_progress=False)
    seconds = time.perf_counter() - started
    return {"offline": sum(len(output["token_ids"]) for output in outputs) / seconds}


def run_http(
    clients: StreamClients, pids: dict[str, int], prompts: list[Prompt], max_tokens: int
) -> dict[str, float]:
    """Run concurrent streams."""
    before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    timings = clients.stream(prompts, max_tokens)
    used = {name: cpu_seconds(pid) - before[name] for name, pid in pids.items()}
    seconds = max(each.ended_s for each in timings) - min(each.sent_s for each in timings)
    num_tokens = max_tokens * len(timings)  # the clients have checked it
    return {
        "http": num_tokens / seconds,
        **latencies(timings),
        "tokens_per_piece": num_tokens / sum(len(each.pieces_s) for each in timings),
        **{f"cpu_{name}": value / seconds for name, value in used.items()},
    }


def latencies(timings: list[Timing]) -> dict[str, float]:
    """Return median and 99th percentile of the time to the first piece and of the gaps."""
    first = np.array([each.pieces_s[0] - each.sent_s for each in timings])
    gaps = np.concatenate([np.diff(each.pieces_s) for each in timings])
    named = {"first_token": first, "gap": gaps}
    return {
        f"{name}_ms_p{percent}": 1e3 * float(np.percentile(values, percent))
        for name, values in named.items()
        for percent in (50, 99)
    }


def server_pids(pid: int) -> dict[str, int]:
    """Return the processes of a server, by what they do."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()  # the oldest first
    # Another child is Python's own, which cleans up after these.
    is_worker = {
        each: b"spawn_main" in Path(f"/proc/{each}/cmdline").read_bytes() for each in children
    }
    workers = [int(each) for each in children if is_worker[each]]
    return dict(zip(("server", "text_worker", "scheduler"), [pid, *workers], strict=True))


def cpu_seconds(pid: int) -> float:
    """Return what a process has used so far, of all its threads, in user and system mode."""
    # What follows the name, which may have spaces, are fields 3 and up of proc(5).
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
