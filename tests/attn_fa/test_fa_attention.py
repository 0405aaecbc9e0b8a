"""The backend ``fa`` over fakes of every generation against a naive reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minisgl.attention.contract import AttentionBackend
from minisgl.errors import PluginError, SettingsError
from tests.attn_fa.conftest import Install
from tests.fakes.attention_case import (
    AttentionCase,
    CaseShape,
    ReplayedDecode,
    Step,
    assert_near,
    replay_by_calling,
)

GROUP_SIZES = (1, 2, 3, 5, 7, 8)
PREFILL_ROWS = [Step(1, 0, 33), Step(2, 128, 200), Step(3, 299, 300), Step(0, 0, 1)]
DECODE_ROWS = [Step(3, 299, 300), Step(0, 0, 1), Step(4, 16, 17), Step(2, 255, 256)]

# Generation and the page sizes that it allows.
PAGED = [
    *[("3", size) for size in (1, 16, 64, 256)],
    *[("4", size) for size in (1, 16, 64, 256)],
    ("sgl", 16),
    ("2", 256),
]
GENERATIONS = [("2", 256), ("3", 16), ("4", 16)]


def make_backend(case: AttentionCase, **settings: Any) -> AttentionBackend:
    # Imported here, because the fake libraries are installed by a fixture.
    from minisgl_attn_fa.backend import FlashAttentionBackend  # noqa: PLC0415
    from minisgl_attn_fa.settings import FlashAttentionSettings  # noqa: PLC0415

    return FlashAttentionBackend(case.config(FlashAttentionSettings(**settings)))


def check_eager(case: AttentionCase, backend: AttentionBackend, rows: list[Step]) -> None:
    is_prefill = rows is PREFILL_ROWS
    batch = case.prefill(rows) if is_prefill else case.decode(rows)
    q = case.queries(sum(row.seq_len - row.cached_len for row in rows))
    backend.prepare_metadata(batch)
    for layer_id in range(len(case.shape.windows)):
        out = backend.forward(q, layer_id, batch)
        assert out.dtype == case.shape.dtype
        assert out.is_contiguous()
        assert_near(out, case.expected_of(q, rows, layer_id))


@pytest.mark.parametrize("rows", [PREFILL_ROWS, DECODE_ROWS], ids=["prefill", "decode"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("version", "page_size"), PAGED)
def test_it_gives_the_reference_result(
    install: Install, version: str, page_size: int, dtype: torch.dtype, rows: list[Step]
) -> None:
    install(version)
    case = AttentionCase(CaseShape(page_size=page_size, dtype=dtype))
    check_eager(case, make_backend(case), rows)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize(("version", "page_size"), GENERATIONS)
def test_every_ratio_of_heads_is_served(
    install: Install, version: str, page_size: int, group_size: int
) -> None:
    install(version)
    case = AttentionCase(CaseShape(num_qo_heads=2 * group_size, page_size=page_size))
    backend = make_backend(case)
    check_eager(case, backend, PREFILL_ROWS)
    check_eager(case, backend, DECODE_ROWS)


@pytest.mark.parametrize(("version", "page_size"), GENERATIONS)
def test_each_layer_has_its_own_window(install: Install, version: str, page_size: int) -> None:
    install(version)
    case = AttentionCase(CaseShape(windows=(-1, 31, 0), page_size=page_size))
    backend = make_backend(case)
    check_eager(case, backend, PREFILL_ROWS)
    check_eager(case, backend, DECODE_ROWS)


@pytest.mark.parametrize(("version", "page_size"), PAGED)
def test_graphs_of_padded_sizes_give_the_reference_result(
    install: Install, version: str, page_size: int
) -> None:
    install(version)
    case = AttentionCase(CaseShape(page_size=page_size, windows=(-1, 20)))
    backend = make_backend(case)
    backend.init_graph(8)
    graphs = {size: ReplayedDecode(backend, case, size, replay_by_calling) for size in (8, 4, 2)}
    for size, rows in ((4, DECODE_ROWS[:3]), (8, DECODE_ROWS), (2, DECODE_ROWS[:1])):
        q = case.queries(len(rows))
        outs = graphs[size].run(rows, q)
        for layer_id, out in enumerate(outs):
            assert_near(out[: len(rows)], case.expected_of(q, rows, layer_id))
            assert out.isfinite().all()


def test_a_replay_follows_pages_that_the_engine_gave_out_after_planning(install: Install) -> None:
    install("4")
    case = AttentionCase(CaseShape())
    backend = make_backend(case)
    backend.init_graph(4)
    graph = ReplayedDecode(backend, case, 4, replay_by_calling)
    q = case.queries(4)
    table = case.context.page_table
    right = table.clone()
    table.fill_(case.pool.dummy_page)
    backend.prepare_for_replay(graph.load(case.decode(DECODE_ROWS), q))
    table.copy_(right)  # as an engine does whose graph begins with the new pages
    assert_near(graph.replay()[0], case.expected_of(q, DECODE_ROWS))


def test_nothing_is_planned_on_the_host_for_a_replay(install: Install) -> None:
    install("3")
    case = AttentionCase(CaseShape())
    backend = make_backend(case)
    backend.init_graph(4)
    graph = ReplayedDecode(backend, case, 4, replay_by_calling)
    q = case.queries(4)
    batch = graph.load(case.decode(DECODE_ROWS), q)
    batch.host = None
    backend.prepare_for_replay(batch)
    assert_near(graph.replay()[0], case.expected_of(q, DECODE_ROWS))


def test_flash_attention_4_is_never_asked_to_split_on_hopper(install: Install) -> None:
    install("4")
    case = AttentionCase(CaseShape())
    check_eager(case, make_backend(case, num_splits=8), DECODE_ROWS)


def test_the_best_installed_generation_is_taken(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("2", "3", "4")
    caplog.set_level("INFO")
    case = AttentionCase(CaseShape())
    make_backend(case)
    assert "FlashAttention 3 by flash_attn_interface" in caplog.text


def test_a_version_can_be_asked_for(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    install("2", "3", "4")
    caplog.set_level("INFO")
    case = AttentionCase(CaseShape())
    check_eager(case, make_backend(case, version="4"), PREFILL_ROWS)
    assert "FlashAttention 4 by flash_attn.cute" in caplog.text


def test_a_page_size_that_does_not_fit_is_refused(install: Install) -> None:
    install("2")
    case = AttentionCase(CaseShape(page_size=16))
    with pytest.raises(SettingsError, match="--page-size 16: FlashAttention 2 allows multiples"):
        make_backend(case)


def test_a_version_that_is_missing_is_refused(install: Install) -> None:
    install("4")
    case = AttentionCase(CaseShape())
    with pytest.raises(PluginError, match="--attn fa: no FlashAttention.*flash_attention|install"):
        make_backend(case, version="3")


def test_a_library_that_cannot_be_imported_is_a_plugin_error(install: Install) -> None:
    folder = install("4")
    (folder / "flash_attn/cute/__init__.py").write_text("raise ImportError('no CUTLASS')")
    case = AttentionCase(CaseShape())
    with pytest.raises(PluginError, match="flash_attn.cute.*ImportError: no CUTLASS"):
        make_backend(case)
