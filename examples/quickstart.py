"""Three prompts in one batch, through the offline interface."""

from __future__ import annotations

import sys
import time

import torch

from minisgl.core import SamplingParams
from minisgl.llm import LLM

PROMPTS = ["The capital of France is", "List three prime numbers:", "def fibonacci(n):"]


def main() -> None:
    """Generate 16 tokens for each prompt and print them."""
    with LLM(
        "demo",
        dtype=torch.float32,
        max_running_req=8,
        num_page_override=2048,
        max_seq_len_override=512,
    ) as llm:
        started = time.perf_counter()
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=16, ignore_eos=True))
        elapsed = time.perf_counter() - started
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        sys.stdout.write(f"{prompt!r} -> {output['text']!r}\n")
    sys.stdout.write(f"3 requests x 16 tokens, {elapsed:.2f} s\n")


if __name__ == "__main__":
    main()
