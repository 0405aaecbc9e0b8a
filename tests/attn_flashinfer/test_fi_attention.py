"""The backend ``fi`` on a fake FlashInfer against a naive reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minisgl.attention.contract import AttentionBackend
from minisgl.errors import CapacityError, SettingsError
from tests.fakes.attention_case import (
    AttentionCase,
    CaseShape,
    ReplayedDecode,
    Step,
    assert_near,
    replay_by_calling,
)

PAGE_SIZES = (1, 16, 64, 256)
GROUP_SIZES = (1, 2, 3, 5, 7, 8)

PREFILL_ROWS = [
    Step(1, 0, 33),  # a whole prompt
    Step(2, 128, 200),  # a middle chunk on a cached prefix
    Step(3, 299, 300),  # one token
    Step(0, 0, 1),
]
DECODE_ROWS = [Step(3, 299, 300), Step(0, 0, 1), Step(4, 16, 17), Step(2, 255, 256)]


def make_backend(case: AttentionCase, **settings: Any) -> AttentionBackend:
    # Imported here, because the fake library is installed by a fixture.
    from minisgl_attn_flashinfer.backend import FlashInferBackend  # noqa: PLC0415
    from minisgl_attn_flashinfer.settings import FlashInferSettings  # noqa: PLC0415

    return FlashInferBackend(case.config(FlashInferSettings(workspace_mib=16, **settings)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_prefill_gives_the_reference_result(page_size: int, dtype: torch.dtype) -> None:
    case = AttentionCase(CaseShape(page_size=page_size, dtype=dtype))
    backend, batch = make_backend(case), case.prefill(PREFILL_ROWS)
    q = case.queries(33 + 72 + 1 + 1)
    backend.prepare_metadata(batch)
    out = backend.forward(q, 0, batch)
    assert out.dtype == dtype
    assert out.is_contiguous()
    assert_near(out, case.expected_of(q, PREFILL_ROWS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_decode_gives_the_reference_result(page_size: int, dtype: torch.dtype) -> None:
    case = AttentionCase(CaseShape(page_size=page_size, dtype=dtype))
    backend, batch = make_backend(case), case.decode(DECODE_ROWS)
    q = case.queries(4)
    backend.prepare_metadata(batch)
    out = backend.forward(q, 0, batch)
    assert_near(out, case.expected_of(q, DECODE_ROWS))


@pytest.mark.parametrize("mode", ["auto", "always"])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_every_ratio_of_heads_decodes(group_size: int, mode: str) -> None:
    case = AttentionCase(CaseShape(num_qo_heads=2 * group_size))
    backend, batch = make_backend(case, decode_tensor_cores=mode), case.decode(DECODE_ROWS)
    q = case.queries(4)
    backend.prepare_metadata(batch)
    out = backend.forward(q, 0, batch)
    assert_near(out, case.expected_of(q, DECODE_ROWS))


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_every_ratio_of_heads_prefills(group_size: int) -> None:
    case = AttentionCase(CaseShape(num_qo_heads=2 * group_size))
    backend, batch = make_backend(case), case.prefill(PREFILL_ROWS)
    q = case.queries(107)
    backend.prepare_metadata(batch)
    out = backend.forward(q, 0, batch)
    assert_near(out, case.expected_of(q, PREFILL_ROWS))


def test_layers_with_different_windows_are_planned_apart() -> None:
    case = AttentionCase(CaseShape(windows=(-1, 31, -1, 0)))
    backend = make_backend(case)
    for batch, rows in ((case.prefill(PREFILL_ROWS), PREFILL_ROWS), (None, DECODE_ROWS)):
        step = case.decode(rows) if batch is None else batch
        q = case.queries(sum(row.seq_len - row.cached_len for row in rows))
        backend.prepare_metadata(step)
        for layer_id in range(4):
            out = backend.forward(q, layer_id, step)
            expected = case.expected_of(q, rows, layer_id)
            assert_near(out, expected)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("group_size", [2, 7])
def test_graphs_of_padded_sizes_give_the_reference_result(group_size: int, page_size: int) -> None:
    shape = CaseShape(num_qo_heads=2 * group_size, page_size=page_size, windows=(-1, 20))
    case = AttentionCase(shape)
    backend = make_backend(case)
    backend.init_graph(8)
    graphs = {size: ReplayedDecode(backend, case, size, replay_by_calling) for size in (8, 4, 2)}
    for size, rows in ((4, DECODE_ROWS[:3]), (8, DECODE_ROWS), (2, DECODE_ROWS[:1]), (4, [])):
        q = case.queries(len(rows))
        outs = graphs[size].run(rows, q)
        for layer_id, out in enumerate(outs if rows else []):
            expected = case.expected_of(q, rows, layer_id)
            assert_near(out[: len(rows)], expected)
        assert all(bool(out.isfinite().all()) for out in outs)


def test_a_size_may_be_captured_twice() -> None:
    case = AttentionCase(CaseShape())
    backend = make_backend(case)
    backend.init_graph(4)
    graphs = [ReplayedDecode(backend, case, 4, replay_by_calling) for _ in range(2)]
    for graph in graphs:
        q = case.queries(4)
        out = graph.run(DECODE_ROWS, q)[0]
        assert_near(out, case.expected_of(q, DECODE_ROWS))


def test_eager_steps_between_replays_do_not_disturb_a_graph() -> None:
    case = AttentionCase(CaseShape())
    backend = make_backend(case)
    backend.init_graph(4)
    graph = ReplayedDecode(backend, case, 4, replay_by_calling)
    for batch in (case.prefill(PREFILL_ROWS), case.decode(DECODE_ROWS[:2])):
        backend.prepare_metadata(batch)
        backend.forward(case.queries(107 if batch.is_prefill else 2), 0, batch)
        q = case.queries(4)
        out = graph.run(DECODE_ROWS, q)[0]
        assert_near(out, case.expected_of(q, DECODE_ROWS))


@pytest.mark.parametrize("is_fast", [True, False])
def test_graphs_work_with_and_without_the_short_plan(
    is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_fast:
        monkeypatch.delattr("flashinfer.decode.fast_decode_plan")
    case = AttentionCase(CaseShape())
    backend = make_backend(case)
    backend.init_graph(4)
    q = case.queries(4)
    out = ReplayedDecode(backend, case, 4, replay_by_calling).run(DECODE_ROWS, q)[0]
    assert_near(out, case.expected_of(q, DECODE_ROWS))


def test_a_short_plan_that_differs_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken_plan(self: Any, *args: Any, global_override_indptr_cpu: Any, **rest: Any) -> None:
        raise TypeError("takes 19 arguments")

    monkeypatch.setattr("flashinfer.decode.fast_decode_plan", broken_plan)
    case = AttentionCase(CaseShape())
    backend = make_backend(case)
    backend.init_graph(4)
    q = case.queries(4)
    out = ReplayedDecode(backend, case, 4, replay_by_calling).run(DECODE_ROWS, q)[0]
    assert_near(out, case.expected_of(q, DECODE_ROWS))
    assert "fast_decode_plan does not fit" in caplog.text


def test_a_replay_without_a_new_plan_is_caught_by_the_fake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forgetful_plan(self: Any, *args: Any, global_override_indptr_cpu: Any, **rest: Any) -> None:
        """Fill nothing: the lengths in the buffers change, the schedule does not."""

    monkeypatch.setattr("flashinfer.decode.fast_decode_plan", forgetful_plan)
    case = AttentionCase(CaseShape())
    backend = make_backend(case)
    backend.init_graph(4)
    graph = ReplayedDecode(backend, case, 4, replay_by_calling)
    with pytest.raises(AssertionError, match="plan again"):
        graph.run(DECODE_ROWS, case.queries(4))


def test_cuda_cores_refuse_a_ratio_that_they_do_not_serve() -> None:
    case = AttentionCase(CaseShape(num_qo_heads=14))
    with pytest.raises(SettingsError, match="decode-tensor-cores never.*has 7; allowed: auto"):
        make_backend(case, decode_tensor_cores="never")


def test_fa3_prefill_is_refused_where_the_gpu_does_not_run_it() -> None:
    case = AttentionCase(CaseShape())
    with pytest.raises(SettingsError, match="prefill-backend fa3: needs compute capability 9.0"):
        make_backend(case, prefill_backend="fa3")


def test_a_full_workspace_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, *args: Any, **options: Any) -> None:
        raise RuntimeError("Failed to allocate memory from workspace for batch_prefill_tmp_v")

    monkeypatch.setattr("flashinfer.BatchPrefillWithPagedKVCacheWrapper.plan", full)
    case = AttentionCase(CaseShape())
    backend, batch = make_backend(case), case.prefill(PREFILL_ROWS)
    with pytest.raises(CapacityError, match="--fi.workspace-mib 16: too small"):
        backend.prepare_metadata(batch)


def test_many_pages_per_request_are_listed_right() -> None:
    case = AttentionCase(CaseShape(page_size=1, max_seq_len=800))
    rows = [Step(0, 699, 700), Step(1, 649, 650)]
    backend, batch, q = make_backend(case), case.decode(rows), case.queries(2)
    backend.prepare_metadata(batch)
    out = backend.forward(q, 0, batch)
    assert_near(out, case.expected_of(q, rows))
