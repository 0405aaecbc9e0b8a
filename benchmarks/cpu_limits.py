"""What the CPU and the process itself allow: a decode step over its floor, start-up, memory.

    python -m benchmarks.cpu_limits step --shape qwen3-0.6b     # 2.4 GB of dummy weights
    python -m benchmarks.cpu_limits step --shape demo --batch 1,3,16
    python -m benchmarks.cpu_limits start                       # the demo model, float32

``step`` holds the time of a decode step against its floor: the bytes of all weights that a step
reads over the read bandwidth, measured in the same round by products of large matrices with one
vector, which read in several streams. Medians over the rounds.

``start`` runs fresh processes and reports seconds from the start of the process to the first
token, imports included, and the peak of resident memory: in all, and what the model added to the
libraries. Python's bytecode caches must be warm, as they are after an installation.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.shapes import SHAPES, write_shape
from minisgl import LLM, SamplingParams

NUM_TOKENS = 6
# The demo model: 30 layers of 576, 9 and 3 heads of 64, MLP of 1536, tied vocabulary of 49152.
DEMO_STEP_BYTES = 4 * (30 * 576 * (960 + 576 + 3 * 1536) + 49152 * 576)

_STARTED = """
import json, os, time
def status():
    lines = dict(line.split(":") for line in open("/proc/self/status") if line.startswith("Vm"))
    return {name: int(lines[name].split()[0]) / 1024 for name in ("VmHWM", "VmRSS")}
def age():
    ticks = int(open("/proc/self/stat").read().rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
import torch
import minisgl.engine.build, minisgl.llm, minisgl.weights.gguf_tokenizer
from minisgl import LLM, SamplingParams
libraries = status()
libraries["seconds"] = age()
llm = LLM("demo", dtype=torch.float32)
llm.generate("The capital of France is", SamplingParams(max_tokens=1))
print(json.dumps({"libraries": libraries, "first_s": age(), **status()}))
"""


def step_bytes(shape: str) -> int:
    """Return the bytes of float32 weights that one decode step reads."""
    if shape == "demo":
        return DEMO_STEP_BYTES
    config = SHAPES[shape]
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    num_q, num_kv = config["num_attention_heads"], config["num_key_value_heads"]
    attention = hidden * head_dim * (2 * num_q + 2 * num_kv)
    layer = attention + 3 * hidden * config["intermediate_size"]
    return int(4 * (config["num_hidden_layers"] * layer + config["vocab_size"] * hidden))


def read_bandwidth(weights: list[torch.Tensor], x: torch.Tensor) -> float:
    """Return bytes per second that products with one vector read."""
    started = time.perf_counter()
    for weight in weights:
        torch.mv(weight, x)
    return sum(weight.nbytes for weight in weights) / (time.perf_counter() - started)


def step_seconds(llm: LLM, batch: int, seed: int) -> float:
    """Return the seconds of one decode step: a call of several tokens less one of one token.

    A run under real-time priority is stopped for a while when it has taken a whole second, so the
    calls are short, and each comes after a pause.
    """
    prompts = [
        [100 + (seed * 997 + row * 31 + i * 7) % 9000 for i in range(16)] for row in range(batch)
    ]
    elapsed = []
    for num_tokens in (1, NUM_TOKENS):
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        time.sleep(0.5)
        started = time.perf_counter()
        llm.generate(prompts, params, show_progress=False)
        elapsed.append(time.perf_counter() - started)
    return (elapsed[1] - elapsed[0]) / (NUM_TOKENS - 1)


def run_step(shape: str, batches: list[int], rounds: int) -> None:
    """Print decode steps over their floor."""
    weights, x = [torch.ones(4096, 4096) for _ in range(8)], torch.ones(4096)
    with tempfile.TemporaryDirectory() as folder:
        settings = {"dtype": torch.float32, "max_seq_len_override": 1024}
        if shape == "demo":
            llm = LLM("demo", **settings)
        else:
            path = write_shape(shape, Path(folder))
            llm = LLM(str(path), use_dummy_weight=True, **settings)
        print(f"{shape}: a step reads {step_bytes(shape) / 1e6:.0f} MB")
        for batch in batches:
            ratios, steps, floors = [], [], []
            for number in range(rounds + 1):
                floor_s = step_bytes(shape) / read_bandwidth(weights, x)
                step_s = step_seconds(llm, batch, number)
                if number:
                    ratios.append(step_s / floor_s)
                    steps.append(step_s)
                    floors.append(floor_s)
            step_ms, floor_ms = (statistics.median(v) * 1e3 for v in (steps, floors))
            ratio = statistics.median(ratios)
            print(
                f"batch {batch:3} step {step_ms:6.1f} ms, floor {floor_ms:6.1f}, ratio {ratio:.2f}"
            )


def run_start(rounds: int) -> None:
    """Print start-up times and memory of fresh processes."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as cache:
        env.setdefault("PYTHONPYCACHEPREFIX", cache)
        results = []
        for number in range(rounds + 1):
            out = subprocess.run(
                [sys.executable, "-c", _STARTED], env=env, capture_output=True, check=True
            )
            if number:
                results.append(json.loads(out.stdout))
    model_mb = DEMO_STEP_BYTES / 2**20
    first_s = statistics.median(r["first_s"] for r in results)
    import_s = statistics.median(r["libraries"]["seconds"] for r in results)
    peak = statistics.median(r["VmHWM"] for r in results)
    added = statistics.median(r["VmHWM"] - r["libraries"]["VmRSS"] for r in results)
    print(f"first token after {first_s:.2f} s, of which imports {import_s:.2f} s")
    print(
        f"peak {peak:.0f} MiB; libraries alone {peak - added:.0f}; added {added:.0f}, which is "
        f"{added / model_mb:.2f} times the {model_mb:.0f} MiB of weights"
    )


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("step", "start"))
    parser.add_argument("--shape", default="qwen3-0.6b", choices=("demo", *SHAPES))
    parser.add_argument("--batch", default="1,3,16")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    if args.what == "start":
        run_start(args.rounds)
    else:
        run_step(args.shape, [int(batch) for batch in args.batch.split(",")], args.rounds)


if __name__ == "__main__":
    main()
