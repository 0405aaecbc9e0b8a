"""What a benchmark asks for."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from minisgl.errors import SettingsError

_WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world",
    "school", "state", "family", "student", "group", "country", "problem", "hand", "part", "place",
    "case", "week", "company", "system", "program", "question", "work", "number", "night",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Task:
    """One request of a workload.

    Attributes:
        prompt: Its text.
        max_tokens: Tokens to generate.
        arrival_s: When it is sent, in seconds from the start; ``None`` leaves that to the load.
    """

    prompt: str
    max_tokens: int
    arrival_s: float | None = None


def random_tasks(num: int, num_words: int, max_tokens: int, seed: int) -> list[Task]:
    """Make prompts of random words, which share nothing."""
    rng = random.Random(seed)
    return [
        Task(f"{rng.random()} {' '.join(rng.choices(_WORDS, k=num_words))}", max_tokens)
        for _ in range(num)
    ]


def shared_prefix_tasks(
    num: int, num_words: int, max_tokens: int, seed: int, num_groups: int
) -> list[Task]:
    """Make prompts in groups; those of a group have nine tenths in common."""
    rng = random.Random(seed)
    num_shared = num_words * 9 // 10
    prefixes = [
        f"{rng.random()} {' '.join(rng.choices(_WORDS, k=num_shared))}" for _ in range(num_groups)
    ]
    return [
        Task(
            f"{rng.choice(prefixes)} {' '.join(rng.choices(_WORDS, k=num_words - num_shared))}",
            max_tokens,
        )
        for _ in range(num)
    ]


def trace_tasks(path: Path, num: int | None, max_tokens: int) -> list[Task]:
    """Read requests from JSON lines with ``prompt`` and maybe ``max_tokens`` and ``arrival_s``.

    Raises:
        SettingsError: The file cannot be read; the message names the line.
    """
    tasks: list[Task] = []
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--trace {path}: cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if len(tasks) == num:
            break
        try:
            row = json.loads(line)
            arrival_s = float(row["arrival_s"]) if "arrival_s" in row else None
            length = int(row.get("max_tokens", max_tokens))
            tasks.append(Task(str(row["prompt"]), length, arrival_s))
        except (ValueError, KeyError, TypeError) as error:
            raise SettingsError(f"--trace {path}: line {number}: {error!r}") from error
    return tasks
