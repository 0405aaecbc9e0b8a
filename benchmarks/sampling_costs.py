"""What parameters of requests cost: tokens/s of batches that ask for more than greedy tokens.

    python -m benchmarks.sampling_costs --shape qwen3-0.6b
    python -m benchmarks.sampling_costs --shape tiny --batches 1,4 --max-tokens 16

Each line is one batch whose requests all have these parameters, but for ``one of them``, where one
request has a penalty and the others are greedy. The share is that of the greedy batch: batches take
turns, and the medians count.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.offline import prompt, timed
from benchmarks.shapes import SHAPES, write_shape
from minisgl import LLM, SamplingParams

_PROMPT_TOKENS = 128
PARAMETERS: Mapping[str, dict[str, Any]] = {  # fields of SamplingParams
    "greedy": {},
    "temperature": {"temperature": 0.6},
    "seed": {"temperature": 0.6, "seed": 5},
    "top_k": {"temperature": 0.6, "top_k": 50},
    "top_p": {"temperature": 0.6, "top_p": 0.9},
    "top_k, top_p, min_p": {"temperature": 0.6, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    "stop": {"stop": "what no token says"},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "one of them": {"repetition_penalty": 1.1},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"temperature": 0.6, "frequency_penalty": 0.5},
    "logit_bias": {"logit_bias": {5: 2.0}},
    "min_tokens": {"min_tokens": 8},
    "logprobs 0": {"logprobs": 0},
    "logprobs 5": {"logprobs": 5},
}


def batch(name: str, size: int, max_tokens: int) -> list[SamplingParams]:
    """Return the parameters of a batch's requests."""
    always: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True}
    params = [SamplingParams(**always | PARAMETERS[name])] * size
    if name == "one of them":
        params[1:] = [SamplingParams(**always)] * (size - 1)
    return params


def measure(llm: LLM, size: int, max_tokens: int, rounds: int) -> dict[str, float]:
    """Return output tokens per second by name; the first round warms up."""
    rng = random.Random(size)
    rates: dict[str, list[float]] = {name: [] for name in PARAMETERS}
    for _ in range(rounds + 1):
        for name, found in rates.items():
            prompts = [prompt(rng, _PROMPT_TOKENS) for _ in range(size)]
            seconds = timed(llm, prompts, batch(name, size, max_tokens))
            found.append(size * max_tokens / seconds)
    return {name: statistics.median(found[1:]) for name, found in rates.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--batches", default="1,64,256")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        LLM(str(write_shape(args.shape, Path(folder))), dummy_weight=True) as llm,
    ):
        sizes = [int(size) for size in args.batches.split(",")]
        rates = {size: measure(llm, size, args.max_tokens, args.rounds) for size in sizes}
    print(f"{'':22}" + "".join(f"{f'batch {size}':>18}" for size in sizes))
    for name in PARAMETERS:
        cells = (
            f"{rates[n][name]:10,.0f} {rates[n][name] / rates[n]['greedy']:5.2f}" for n in sizes
        )
        print(f"{name:22}" + "".join(f"{cell:>18}" for cell in cells))


if __name__ == "__main__":
    main()
