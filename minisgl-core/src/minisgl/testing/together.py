"""Calls in several threads at once, as several engines of one process make them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

_NUM_ROUNDS = 5


def run_together(calls: Sequence[Callable[[], object]], rule: str) -> None:
    """Make each call several times in a thread of its own, all threads at the same time.

    Args:
        calls: They raise what is wrong.
        rule: What the contract wants, for the message.

    Raises:
        AssertionError: A call has raised; its error is the cause.
    """
    barrier = threading.Barrier(len(calls), timeout=60)

    def repeat(call: Callable[[], object]) -> None:
        for _ in range(_NUM_ROUNDS):
            barrier.wait()
            call()

    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(_guarded, repeat, call, barrier) for call in calls]
    for future in futures:
        error = future.exception()
        if error is not None and not isinstance(error, threading.BrokenBarrierError):
            raise AssertionError(f"{rule}: {error}") from error


def _guarded(
    repeat: Callable[[Callable[[], object]], None],
    call: Callable[[], object],
    barrier: threading.Barrier,
) -> None:
    """Let the other threads go when one fails."""
    try:
        repeat(call)
    except BaseException:
        barrier.abort()
        raise
