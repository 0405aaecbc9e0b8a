"""The backend around the paged reference: planning per window, padding, graph hooks.

Compared with the plain functions that it calls, so results are equal up to rounding (1e-6).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minisgl.attention.contract import AttentionBackend, AttentionConfig, LayerAttention
from minisgl.attention.paged_torch import paged_decode, paged_prefill
from minisgl.attention.split import SplitAttentionBackend
from minisgl.attention.torch_backend import TorchAttentionBackend
from minisgl.core import Batch, Context, Req, SamplingParams, StepArrays
from minisgl.kvcache.pool import KVPool, PoolShape

CPU = torch.device("cpu")
PAGE_SIZE, MAX_PAGES, NUM_ROWS = 4, 8, 5
NUM_Q, NUM_KV, HEAD_DIM = 4, 2, 8
LAYERS = (LayerAttention(0.3), LayerAttention(0.3, 5), LayerAttention(0.5))


@pytest.fixture
def ctx() -> Context:
    context = Context(PAGE_SIZE)
    num_pages = NUM_ROWS * MAX_PAGES
    pool = KVPool(
        PoolShape(len(LAYERS), num_pages, PAGE_SIZE, NUM_KV, HEAD_DIM), torch.float32, CPU
    )
    generator = torch.Generator().manual_seed(0)
    for layer_id in range(len(LAYERS)):
        pool.k_cache(layer_id).normal_(generator=generator)
        pool.v_cache(layer_id).normal_(generator=generator)
    context.kv_pool = pool
    pages = torch.randperm(num_pages, generator=generator).view(NUM_ROWS, MAX_PAGES)
    context.page_table = torch.full((NUM_ROWS + 1, MAX_PAGES), pool.dummy_page, dtype=torch.int32)
    context.page_table[:NUM_ROWS] = pages
    return context


@pytest.fixture
def backend(ctx: Context) -> TorchAttentionBackend:
    return TorchAttentionBackend(
        AttentionConfig(
            context=ctx,
            num_qo_heads=NUM_Q,
            num_kv_heads=NUM_KV,
            head_dim=HEAD_DIM,
            dtype=torch.float32,
            device=CPU,
            layers=LAYERS,
            max_running_reqs=NUM_ROWS,
            max_seq_len=PAGE_SIZE * MAX_PAGES,
        )
    )


def make_batch(
    ctx: Context,
    phase: str,
    rows: list[int],
    cached: list[int],
    lengths: list[int],
    padded: int = 0,
) -> Batch:
    """Make a batch whose requests have ``lengths`` tokens after the step."""
    table = ctx.page_table[:NUM_ROWS].numpy()
    none = np.empty(0, dtype=np.int32)
    table_idx, cached_lens, seq_lens = (
        np.array(values, dtype=np.int32) for values in (rows, cached, lengths)
    )
    reqs = [Req(i, np.ones(1, np.int32), 32, SamplingParams()) for i in rows]
    batch = Batch(reqs, "prefill" if phase == "prefill" else "decode")
    batch.host = StepArrays(table_idx, cached_lens, seq_lens, none, none, none, table)
    num_padding = max(padded - len(rows), 0)
    batch.padded_size = len(rows) + num_padding
    batch.table_idx = torch.tensor(rows + [NUM_ROWS] * num_padding, dtype=torch.int32)
    batch.seq_lens = torch.tensor(lengths + [1] * num_padding, dtype=torch.int32)
    return batch


def random_q(num_tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_tokens, NUM_Q, HEAD_DIM, generator=generator)


def expected_decode(ctx: Context, batch: Batch, q: torch.Tensor, layer_id: int) -> torch.Tensor:
    host, pool, layer = batch.host, ctx.kv_pool, LAYERS[layer_id]
    assert host is not None
    return paged_decode(
        q,
        pool.k_cache(layer_id),
        pool.v_cache(layer_id),
        host.page_table[host.table_idx],
        host.seq_lens,
        layer.sm_scale,
        layer.window_left,
    )


@pytest.mark.parametrize("layer_id", range(len(LAYERS)))
def test_prefill_attends_with_each_layers_window(
    ctx: Context, backend: TorchAttentionBackend, layer_id: int
) -> None:
    batch = make_batch(ctx, "prefill", [3, 0, 4], [0, 7, 0], [6, 12, 32])
    q = random_q(6 + 5 + 32)
    backend.prepare_metadata(batch)
    host, layer = batch.host, LAYERS[layer_id]
    assert host is not None
    expected = paged_prefill(
        q,
        ctx.kv_pool.k_cache(layer_id),
        ctx.kv_pool.v_cache(layer_id),
        host.page_table[host.table_idx],
        np.array([0, 6, 11, 43]),
        host.seq_lens,
        layer.sm_scale,
        layer.window_left,
    )
    torch.testing.assert_close(backend.forward(q, layer_id, batch), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("layer_id", range(len(LAYERS)))
def test_decode_attends_with_each_layers_window(
    ctx: Context, backend: TorchAttentionBackend, layer_id: int
) -> None:
    batch = make_batch(ctx, "decode", [2, 0, 1], [0, 30, 8], [1, 31, 9])
    q = random_q(3)
    backend.prepare_metadata(batch)
    expected = expected_decode(ctx, batch, q, layer_id)
    torch.testing.assert_close(backend.forward(q, layer_id, batch), expected, rtol=0, atol=1e-6)


def test_padding_rows_are_finite_and_change_nothing(
    ctx: Context, backend: TorchAttentionBackend
) -> None:
    batch = make_batch(ctx, "decode", [2, 0], [4, 30], [5, 31], padded=4)
    q = random_q(4)
    backend.prepare_metadata(batch)
    out = backend.forward(q, 0, batch)
    assert out.isfinite().all()
    expected = expected_decode(ctx, batch, q[:2], 0)
    torch.testing.assert_close(out[:2], expected, rtol=0, atol=1e-6)


def test_a_captured_step_follows_its_buffers(ctx: Context, backend: TorchAttentionBackend) -> None:
    captured = make_batch(ctx, "decode", [0], [0], [1], padded=3)
    assert captured.table_idx is not None
    assert captured.seq_lens is not None
    backend.init_graph(4)
    backend.prepare_for_capture(captured)
    for layer_id in range(len(LAYERS)):
        backend.forward(random_q(3), layer_id, captured)
    step = make_batch(ctx, "decode", [3, 1], [8, 30], [9, 31], padded=3)
    assert step.table_idx is not None
    assert step.seq_lens is not None
    captured.table_idx.copy_(step.table_idx)
    captured.seq_lens.copy_(step.seq_lens)
    backend.prepare_for_replay(step)
    q = random_q(3)
    for layer_id in range(len(LAYERS)):
        out = backend.forward(q, layer_id, captured)  # what a replay runs
        expected = expected_decode(ctx, step, q[:2], layer_id)
        torch.testing.assert_close(out[:2], expected, rtol=0, atol=1e-6)
        assert out.isfinite().all()


class Recorder(AttentionBackend):
    def __init__(self, name: str, calls: list[str]) -> None:
        self._name, self._calls = name, calls

    def prepare_metadata(self, batch: Batch) -> None:
        self._calls.append(f"{self._name} prepares {batch.phase}")

    def forward(self, q: torch.Tensor, layer_id: int, batch: Batch) -> torch.Tensor:
        self._calls.append(f"{self._name} attends in {layer_id}")
        return q

    def forward_into(self, out: torch.Tensor, q: torch.Tensor, layer_id: int, batch: Batch) -> None:
        self._calls.append(f"{self._name} fills {layer_id}")

    def init_graph(self, max_batch_size: int) -> None:
        self._calls.append(f"{self._name} expects {max_batch_size}")

    def prepare_for_capture(self, batch: Batch) -> None:
        self._calls.append(f"{self._name} captures")

    def prepare_for_replay(self, batch: Batch) -> None:
        self._calls.append(f"{self._name} replays")


def test_a_pair_sends_each_phase_to_its_backend() -> None:
    calls: list[str] = []
    pair = SplitAttentionBackend(Recorder("p", calls), Recorder("d", calls))
    for batch in (Batch([], "prefill"), Batch([], "decode")):
        pair.prepare_metadata(batch)
        pair.forward(torch.empty(0), 3, batch)
    assert calls == ["p prepares prefill", "p attends in 3", "d prepares decode", "d attends in 3"]


def test_a_pair_lets_each_backend_write_the_result_itself() -> None:
    calls: list[str] = []
    pair = SplitAttentionBackend(Recorder("p", calls), Recorder("d", calls))
    for batch in (Batch([], "prefill"), Batch([], "decode")):
        pair.forward_into(torch.empty(0), torch.empty(0), 3, batch)
    assert calls == ["p fills 3", "d fills 3"]


def test_decode_batches_are_split_by_their_rows() -> None:
    calls: list[str] = []
    names = ("p", "few", "many")
    split = SplitAttentionBackend(*(Recorder(name, calls) for name in names))
    split.init_graph(256)
    for size in (1, 8, 9):
        split.prepare_for_replay(Batch([], "decode", padded_size=size))
    assert calls == [
        "few expects 8",
        "many expects 256",
        "few replays",
        "few replays",
        "many replays",
    ]


def test_graphs_of_a_pair_are_the_decode_backends() -> None:
    calls: list[str] = []
    pair = SplitAttentionBackend(Recorder("p", calls), Recorder("d", calls))
    pair.init_graph(8)
    pair.prepare_for_capture(Batch([], "decode"))
    pair.prepare_for_replay(Batch([], "decode"))
    assert calls == ["d expects 8", "d captures", "d replays"]
