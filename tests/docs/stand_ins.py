"""What stands for words of a documented command that say too little, or that would take long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tests.docs.doc_blocks import Command

PLACEHOLDERS = {"KIND": "policy", "NAME": "sample", "FILE": "trace.jsonl"}
"""The file is the one that a page has recorded before."""

ADDED = {
    "curl": "--fail-with-body --silent --show-error",
    "python -m benchmarks.cpu_limits step": "--shape tiny --batch 1 --rounds 1",
    "python -m benchmarks.cpu_limits start": "--rounds 1",
    "python -m benchmarks.cpu_vs_hf": "--rounds 1 --rows first_token",
    "python -m benchmarks.offline": "--shape tiny --rows ttft",
    "python -m benchmarks.sampling_costs": "--shape tiny --batches 1 --max-tokens 8 --rounds 1",
    "python -m benchmarks.server_overhead": "--shape tiny --max-tokens 4 --rounds 1",
    "python benchmarks/radix.py": "--repeat 1",
    "python benchmarks/scheduler_host.py": "--batch-sizes 4 --steps 20",
    "pytest tests/moe_triton/check_fused_layers.py": "-k test_half_types",
}
"""Arguments that are added to what begins like this, so it ends soon or fails by its exit code."""

FEWER = ("--num-requests", "--concurrency")
"""Flags of `minisgl bench serve` whose numbers are lowered."""

NAMES = ("bench serve", "chat", "generate", "replay", "serve")
"""Subcommands that need arguments: where a text only names one, it is asked for its help."""

NEED_A_GPU = {"cuda", "fa", "fi", "fused"}
NO_GPU = r"needs (an NVIDIA GPU|2 NVIDIA GPUs|a CUDA device)"


def with_stand_ins(command: Command) -> Command:
    """Return the command that is run in place of a documented one."""
    words = [PLACEHOLDERS.get(word, word) for word in command.words]
    text = " ".join(words)
    if text == "pip install" or text in (f"minisgl {name}" for name in NAMES):
        words.append("--help")
    if words[1:3] == ["bench", "serve"] and "--help" not in words:
        words = with_fewer_requests(words)
    for start, added in ADDED.items():
        if f"{text} ".startswith(f"{start} "):
            words += added.split()
    return replace(command, words=tuple(words))


def with_fewer_requests(words: Sequence[str]) -> list[str]:
    """Put as little load on the server as a test needs."""
    kept = list(words)
    for flag in FEWER:
        if flag in kept:
            kept[kept.index(flag) + 1] = "4"
    return kept if "--num-requests" in kept else [*kept, "--num-requests", "4"]


def refusal(words: Sequence[str]) -> str:
    """Return what a machine without a GPU has to answer, as a pattern; empty when it can obey."""
    is_benchmark = words[1:3] == ["bench", "moe"] or any("benchmarks.gpu_" in w for w in words)
    names = {name for word in words for name in word.split(",")}
    is_refused = is_benchmark or ("serve" in words and names & NEED_A_GPU)
    return NO_GPU if is_refused and "--help" not in words else ""
