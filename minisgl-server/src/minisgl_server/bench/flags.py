"""What the flags of ``minisgl bench serve`` allow; checked before anything is sent."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping

from minisgl.errors import SettingsError

_COUNTS: Mapping[str, tuple[int, int]] = {
    "num_requests": (1, 10**7),
    "concurrency": (1, 10**7),
    "prompt_words": (1, 10**7),
    "max_tokens": (1, 2**31 - 1),
    "shared_prefixes": (0, 10**7),
}
_POSITIVE = ("request_rate", "request_timeout_s", "goodput_ttft_s", "goodput_itl_s")


def check_flags(arguments: Namespace) -> None:
    """See that every number can be used; those that are ``None`` were not given.

    Raises:
        SettingsError: One cannot; the message names flag, value and what is allowed.
    """
    for name, (low, high) in _COUNTS.items():
        count = getattr(arguments, name)
        if count is not None and not low <= count <= high:
            raise SettingsError(f"{_flag(name)} {count}: must be an integer from {low} to {high}")
    for name in _POSITIVE:
        value = getattr(arguments, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise SettingsError(f"{_flag(name)} {value}: must be a number above 0")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
