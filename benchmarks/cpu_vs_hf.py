"""The offline LLM on a CPU against Hugging Face ``generate`` on the same weights, float32.

    python -m benchmarks.cpu_vs_hf                 # the demo model
    python -m benchmarks.cpu_vs_hf --rounds 5 --rows quickstart,decode

Both run in this process, turn and turn about, and each row is the median over the rounds of the
ratio ``HF seconds / our seconds`` (more is better), so that the machine's mood cancels out. Each
row also checks that both made the same tokens.

* ``quickstart``: 3 prompts × 16 tokens in one batch.
* ``decode``: one prompt of 16 tokens, 64 more: the time per token after the first.
* ``first_token``: one prompt of 128 tokens, 1 token.
* ``ragged``: 16 prompts of 64 … 256 tokens × 64 tokens; HF in one left-padded batch.
* ``shared``: 8 prompts of 512 shared and 32 own tokens × 32 tokens, nothing cached beforehand.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from minisgl import LLM, SamplingParams
from minisgl.plugin.manager import PluginManager
from minisgl.weights.resolve import open_model

Ids = list[list[int]]
_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class Workload:
    """One row.

    Attributes:
        prompts: Token ids.
        num_tokens: To generate for each.
        is_rate: Compare the time per token after the first, not the whole call.
    """

    prompts: Ids
    num_tokens: int
    is_rate: bool = False


def load_hf() -> LlamaForCausalLM:
    """Load the demo model's weights into Hugging Face's class."""
    files = open_model("demo", "auto", PluginManager.bootstrap())
    config = LlamaConfig(**files.config)
    model: LlamaForCausalLM = LlamaForCausalLM(config).eval()
    reader = files.open_weights()
    state = {
        name: reader.read(name, (slice(None),) * len(reader.shape(name))) for name in reader.names()
    }
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    # Neither side stops at an end of sequence, and neither pays for masking it.
    model.generation_config.eos_token_id = None
    return model


def workloads(llm: LLM, rng: random.Random) -> dict[str, Workload]:
    """Make fresh prompts, so that no round finds the last one's prefixes in the cache."""

    def ids(length: int) -> list[int]:
        return [rng.randrange(100, 40_000) for _ in range(length)]

    texts = ("The capital of France is", "List three prime numbers:", "def fibonacci(n):")
    shared = ids(512)
    return {
        "quickstart": Workload([llm.tokenizer(text)["input_ids"] for text in texts], 16),
        "decode": Workload([ids(16)], 64, is_rate=True),
        "first_token": Workload([ids(128)], 1),
        "ragged": Workload([ids(rng.randint(64, 256)) for _ in range(16)], 64),
        "shared": Workload([shared + ids(32) for _ in range(8)], 32),
    }


def run_hf(model: LlamaForCausalLM, work: Workload, num_tokens: int) -> Ids:
    """Generate greedily in one left-padded batch."""
    width = max(map(len, work.prompts))
    padded = torch.tensor([[0] * (width - len(p)) + p for p in work.prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in work.prompts])
    with torch.inference_mode():
        out = model.generate(
            padded,
            attention_mask=mask,
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    tokens: Ids = out[:, width:].tolist()
    return tokens


def run_ours(llm: LLM, work: Workload, num_tokens: int) -> Ids:
    """Generate greedily."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    return [o["token_ids"] for o in llm.generate(work.prompts, params, show_progress=False)]


def seconds(run: Callable[[int], Ids], work: Workload) -> tuple[float, Ids]:
    """Time a run; for a rate, less the time to the first token, per token.

    The pauses are for real-time priority (``chrt -f 10`` on a busy machine), under which a process
    is stopped for a while when it has taken a whole second.
    """
    first_s = 0.0
    if work.is_rate:
        time.sleep(_PAUSE_S)
        started = time.perf_counter()
        run(1)
        first_s = time.perf_counter() - started
    time.sleep(_PAUSE_S)
    started = time.perf_counter()
    tokens = run(work.num_tokens)
    elapsed = time.perf_counter() - started
    return ((elapsed - first_s) / (work.num_tokens - 1) if work.is_rate else elapsed), tokens


def main() -> None:
    """Run the rounds and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", default="quickstart,decode,first_token,ragged,shared")
    parser.add_argument("--cache", default="radix")
    args = parser.parse_args()
    model = load_hf()
    llm = LLM("demo", dtype=torch.float32, max_running_req=32, cache=args.cache)
    rng = random.Random(0)
    rows: dict[str, list[tuple[float, float, bool]]] = {name: [] for name in args.rows.split(",")}
    for number in range(args.rounds + 1):  # the first one warms up
        works = workloads(llm, rng)
        for name, timings in rows.items():
            work = works[name]
            hf_s, expected = seconds(partial(run_hf, model, work), work)
            our_s, tokens = seconds(partial(run_ours, llm, work), work)
            if number:
                timings.append((hf_s, our_s, tokens == expected))
    print(f"{'row':12} {'HF s':>8} {'ours s':>8} {'HF/ours':>8} same tokens")
    for name, timings in rows.items():
        hf_s, our_s, _ = (statistics.median(column) for column in zip(*timings, strict=True))
        ratio = statistics.median(hf / ours for hf, ours, _ in timings)
        same = sum(same for _, _, same in timings)
        print(f"{name:12} {hf_s:8.3f} {our_s:8.3f} {ratio:8.2f} {same}/{len(timings)}")


if __name__ == "__main__":
    main()
