"""Ctrl-C while a context takes a batch or lets go of it."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, cast

import pytest

from minisgl import core
from minisgl.attention.contract import AttentionBackend
from minisgl.core import Batch, Context

BATCH = cast("Batch", "batch")  # nobody looks into it
OWN, STAND_IN = cast("AttentionBackend", "own"), cast("AttentionBackend", "stand-in")


def use(context: Context) -> None:
    with context.forward_batch(BATCH, STAND_IN):
        assert context.attn_backend is STAND_IN


def interrupt(context: Context, at: int) -> bool:
    """Use a context and interrupt it at a line of its own; whether there is such a line."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:  # as sys.settrace has it
        nonlocal count
        if frame.f_code.co_filename != core.__file__:
            return None
        count += event == "line"
        if event == "line" and count == at:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        use(context)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_blocks_do_not_nest() -> None:
    context = Context(page_size=4)
    context.attn_backend = OWN
    with (
        pytest.raises(AssertionError, match="does not nest"),
        context.forward_batch(BATCH),
        context.forward_batch(BATCH),
    ):
        pass


def test_a_context_that_was_interrupted_anywhere_takes_the_next_batch() -> None:
    context = Context(page_size=4)
    context.attn_backend = OWN
    at = 1
    while interrupt(context, at):
        with context.forward_batch(BATCH):
            assert (context.batch, context.attn_backend) == (BATCH, OWN)
        at += 1
    assert at > 15
    with pytest.raises(AssertionError, match="no batch is active"):
        _ = context.batch
