"""A host that runs ahead of the device: nothing in flight may be overwritten."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
from torch import Tensor

from tests.attn_flashinfer.test_fi_attention import (
    DECODE_ROWS,
    PREFILL_ROWS,
    make_backend,
)
from tests.fakes.attention_case import (
    AttentionCase,
    CaseShape,
    ReplayedDecode,
    Step,
    assert_near,
    replay_by_calling,
)
from tests.fakes.fake_stream import STREAM, FakeEvent, HostMemoryOverwrittenError

Outcome = tuple[Tensor, Tensor]  # what a step gave, and what it should


class DeafEvent(FakeEvent):
    """An event that nobody waits for."""

    def synchronize(self) -> None:
        pass


@pytest.fixture
def case() -> AttentionCase:
    return AttentionCase(CaseShape(windows=(-1, 40)))


def use_events(monkeypatch: pytest.MonkeyPatch, kind: type[FakeEvent]) -> None:
    monkeypatch.setattr("minisgl_attn_flashinfer.page_lists.Event", kind)


def run_mixed_steps(case: AttentionCase) -> list[Outcome]:
    """Submit prefill, decode and replayed steps without waiting for any of them."""
    backend = make_backend(case)
    backend.init_graph(8)
    graphs = {size: ReplayedDecode(backend, case, size, replay_by_calling) for size in (8, 4)}
    steps: list[Outcome] = []

    def eager(rows: list[Step], is_prefill: bool) -> None:
        batch = case.prefill(rows) if is_prefill else case.decode(rows)
        q = case.queries(sum(row.seq_len - row.cached_len for row in rows))
        backend.prepare_metadata(batch)
        steps.extend((backend.forward(q, i, batch), case.expected_of(q, rows, i)) for i in range(2))

    def replay(rows: list[Step], size: int) -> None:
        q = case.queries(len(rows))
        outs = graphs[size].run(rows, q)
        # The graph's queries are fixed: what it reads now must not change before it runs.
        steps.extend((out, case.expected_of(q, rows, i)) for i, out in enumerate(outs))
        graphs[size]._q = q.clone()

    with STREAM.defer():
        eager(PREFILL_ROWS, is_prefill=True)
        eager(PREFILL_ROWS[:2], is_prefill=True)
        eager(DECODE_ROWS, is_prefill=False)
        eager(DECODE_ROWS[1:], is_prefill=False)
        replay(DECODE_ROWS, 8)
        replay(DECODE_ROWS[:3], 4)
    return steps


def test_steps_that_are_submitted_ahead_give_the_reference_results(
    case: AttentionCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_events(monkeypatch, FakeEvent)
    steps = run_mixed_steps(case)
    assert len(steps) == 12
    for out, expected in steps:
        assert_near(out[: len(expected)], expected)


def test_the_fake_notices_when_nobody_waits(
    case: AttentionCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_events(monkeypatch, DeafEvent)
    with pytest.raises(HostMemoryOverwrittenError):
        run_mixed_steps(case)


@pytest.mark.parametrize("is_graph", [True, False])
def test_repeated_decode_waits_for_its_own_staging(
    case: AttentionCase, monkeypatch: pytest.MonkeyPatch, is_graph: bool
) -> None:
    use_events(monkeypatch, DeafEvent)
    backend = make_backend(case)
    backend.init_graph(4)
    backend.prepare_for_capture(case.decode([], 4))
    prepare: Callable[..., None] = backend.prepare_metadata
    if is_graph:
        prepare = backend.prepare_for_replay

    def two_steps() -> None:
        with STREAM.defer():
            prepare(case.decode(DECODE_ROWS, 4))
            prepare(case.decode(DECODE_ROWS[:2], 4))

    with pytest.raises(HostMemoryOverwrittenError):
        two_steps()


def test_all_lists_of_a_prefill_plan_come_from_one_pinned_buffer(
    case: AttentionCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A list that FlashInfer has to make for itself is copied from memory that is not pinned.
    backend = make_backend(case)
    kind = vars(importlib.import_module("flashinfer"))["BatchPrefillWithPagedKVCacheWrapper"]
    plan = kind.plan
    from_host: list[tuple[Tensor, ...]] = []

    def spy(wrapper: object, *args: Tensor, **options: Tensor) -> None:
        from_host.append((args[0], args[1], args[3], options["seq_lens"]))
        plan(wrapper, *args, **options)

    monkeypatch.setattr(kind, "plan", spy)
    backend.prepare_metadata(case.prefill(PREFILL_ROWS))
    assert len(from_host) == 2  # one plan for each window
    for lists in from_host:
        assert len({part.untyped_storage().data_ptr() for part in lists}) == 1
