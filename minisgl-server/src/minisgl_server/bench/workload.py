"""What a benchmark asks for."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl.errors import SettingsError

_WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world",
    "school", "state", "family", "student", "group", "country", "problem", "hand", "part", "place",
    "case", "week", "company", "system", "program", "question", "work", "number", "night",
)  # fmt: skip

_LATEST_S = 1e9  # 30 years


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
        lines = path.read_text("utf-8").split("\n")  # JSON may hold what else ends a line
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--trace {path}: cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if len(tasks) == num:
            break
        if not line.strip():
            continue
        try:
            tasks.append(_task(json.loads(line), max_tokens))
        except RecursionError as error:
            raise SettingsError(f"--trace {path}: line {number}: is nested too deeply") from error
        except ValueError as error:
            raise SettingsError(f"--trace {path}: line {number}: {error}") from error
    return tasks


def _task(row: Any, max_tokens: int) -> Task:  # JSON, of any shape
    """Make a task of a line.

    Raises:
        ValueError: Something is not as it must be; the message names it.
    """
    if not isinstance(row, dict):
        raise ValueError("must be an object with prompt")
    prompt, length, arrival_s = (row.get(name) for name in ("prompt", "max_tokens", "arrival_s"))
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(f"prompt {prompt!r:.50}: must be text")
    if length is not None and (type(length) is not int or length < 1):
        raise ValueError(f"max_tokens {length!r:.50}: must be an integer from 1 on")
    if arrival_s is not None and not _is_time(arrival_s):
        raise ValueError(f"arrival_s {arrival_s!r:.50}: must be a number of seconds from 0 on")
    return Task(prompt, max_tokens if length is None else length, arrival_s)


def _is_time(value: Any) -> bool:  # JSON
    return type(value) in (int, float) and 0 <= value < _LATEST_S
