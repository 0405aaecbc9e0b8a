"""Prefill attention against the reference."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.attention.contract import AttentionBackend
from minisgl.testing.attention_case import AttentionCase
from minisgl.testing.paged_batches import Step
from minisgl.testing.reference import assert_close


def check(backend: AttentionBackend, case: AttentionCase, steps: Sequence[Step]) -> None:
    batch = case.prefill(steps)
    q = case.queries(sum(step.seq_len - step.cached_len for step in steps))
    backend.prepare_metadata(batch)
    for layer_id in range(len(case.shape.windows)):
        out = backend.forward(q, layer_id, batch)
        expected = case.expected(q, batch, layer_id)
        assert_close(out, expected, case.shape.dtype, f"layer {layer_id}", "attention")
