"""Garbage collections of a process that serves."""

from __future__ import annotations

import gc


def settle_heap() -> None:
    """Leave what this process has loaded out of all later garbage collections.

    To be called when it begins to serve. A full collection looks at every object there is: once
    torch and a tokenizer are loaded these are some 200,000, which takes 50 to 100 ms and holds up
    every stream. Few of them will ever go. What is garbage by now is collected first, since it
    would stay for good.
    """
    gc.collect()
    gc.freeze()
