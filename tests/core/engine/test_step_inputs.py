"""A step's arrays on their way to the device: what arrives, and in how many copies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minisgl.core import Batch, Context, Req, SamplingParams, StepArrays
from minisgl.engine.inputs import StepInputs
from minisgl.engine.packed import GrowingStaging, Staging
from minisgl.engine.row_params import RowParams
from minisgl.kvcache.pool import KVPool, PoolShape

CPU = torch.device("cpu")
PAGE_SIZE, NUM_PAGES, NUM_ROWS, MAX_PAGES = 4, 400, 8, 40
CAPTURED = 96  # tokens


class Steps:
    """Inputs over an empty pool, and steps whose pages are random."""

    def __init__(self) -> None:
        self.context = Context(PAGE_SIZE)
        self.context.kv_pool = KVPool(PoolShape(1, NUM_PAGES, PAGE_SIZE, 1, 2), torch.float32, CPU)
        self.context.page_table = torch.zeros(NUM_ROWS + 1, MAX_PAGES, dtype=torch.int32)
        self.context.token_pool = torch.zeros(
            NUM_ROWS + 1, MAX_PAGES * PAGE_SIZE, dtype=torch.int32
        )
        self.params = RowParams(NUM_ROWS, 100, 0, is_always_edited=False)
        self.inputs = StepInputs(self.context, self.params, NUM_ROWS)
        self.rng = np.random.default_rng(0)
        self.page_table = (
            self.rng.permutation(NUM_PAGES)[: NUM_ROWS * MAX_PAGES]
            .reshape(NUM_ROWS, MAX_PAGES)
            .astype(np.int32)
        )

    def batch(self, bounds: list[tuple[int, int]], num_new_pages: int = MAX_PAGES) -> Batch:
        """Make a prefill of tokens ``start … end`` each; the middle one of three is cut."""
        rows = self.rng.permutation(NUM_ROWS)[: len(bounds)].astype(np.int32)
        reqs = []
        for row, (start, end) in zip(rows, bounds, strict=True):
            prompt = self.rng.integers(0, 100, end, dtype=np.int32)
            req = Req(int(row), prompt, end + 1, SamplingParams(temperature=0.5, seed=int(row)))
            req.table_idx, req.cached_len = int(row), start
            reqs.append(req)
        self.params.admit(reqs)
        arrays = StepArrays(
            table_idx=rows,
            cached_lens=np.array([start for start, _ in bounds], np.int32),
            seq_lens=np.array([end for _, end in bounds], np.int32),
            page_rows=np.repeat(rows, num_new_pages),
            page_cols=np.tile(np.arange(num_new_pages, dtype=np.int32), len(rows)),
            page_ids=self.page_table[rows, :num_new_pages].reshape(-1),
            page_table=self.page_table,
        )
        return Batch(reqs, "prefill", [i != 1 for i in range(len(reqs))], arrays)

    def decode(self, num_reqs: int, num_new_pages: int) -> Batch:
        """Make a step of one token each."""
        batch = self.batch([(9, 10)] * num_reqs, num_new_pages)
        return Batch(batch.reqs, "decode", [], batch.host)


@pytest.fixture
def steps() -> Steps:
    return Steps()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the copies to the device, in bytes."""
    sizes: list[int] = []
    submit = Staging.submit

    def count(staging: Staging, num_bytes: int) -> None:
        sizes.append(num_bytes)
        submit(staging, num_bytes)

    monkeypatch.setattr(Staging, "submit", count)
    return sizes


def values(tensor: torch.Tensor | None) -> list[int]:
    assert tensor is not None
    return tensor.tolist()


@pytest.mark.parametrize("size", [None, CAPTURED])
def test_a_prefill_brings_what_each_token_needs(steps: Steps, size: int | None) -> None:
    steps.inputs.prefill_slot(CAPTURED)
    batch = steps.batch([(0, 21), (17, 40), (30, 31)])
    tensors = steps.inputs.load_prefill(batch, size, np.array([3, 7]))
    tokens = [(req, i) for req in batch.reqs for i in range(req.cached_len, req.device_len)]
    assert values(batch.input_ids) == [req.tokens[i] for req, i in tokens]
    assert values(batch.positions) == [i for _, i in tokens]
    assert values(batch.out_loc) == [
        steps.page_table[req.table_idx, i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE
        for req, i in tokens
    ]
    assert values(batch.cu_seqlens_q) == [0, 21, 44, 45]
    assert values(batch.sample_rows) == [20, 44, 3, 7]
    assert batch.max_seqlen_q == 23
    first, _, last = (req.table_idx for req in batch.reqs)
    width = MAX_PAGES * PAGE_SIZE
    assert values(tensors.write_loc) == [first * width + 21, last * width + 31]
    assert values(tensors.sampling.positions) == [21, 31]
    assert values(tensors.sampling.seeds) == [first, last]
    assert values(tensors.sampling.temperature) == [0.5, 0.5]


@pytest.mark.parametrize("size", [None, CAPTURED])
def test_a_prefill_is_one_copy_with_its_page_updates(
    steps: Steps, size: int | None, copies: list[int]
) -> None:
    steps.inputs.prefill_slot(CAPTURED)
    batch = steps.batch([(0, 40), (0, 30)])
    steps.inputs.load_prefill(batch, size)
    assert len(copies) == 1
    for req in batch.reqs:
        row = steps.context.page_table[req.table_idx]
        assert row.tolist() == steps.page_table[req.table_idx].tolist()


def test_padding_of_a_captured_prefill_computes_on_the_dummy_page(steps: Steps) -> None:
    slot = steps.inputs.prefill_slot(CAPTURED)
    steps.inputs.load_prefill(steps.batch([(0, 90)]), CAPTURED)
    steps.inputs.load_prefill(steps.batch([(0, 5)]), CAPTURED)
    assert set(values(slot.device["out_loc"][5:])) == {NUM_PAGES * PAGE_SIZE}
    for name, start in (("input_ids", 5), ("positions", 5), ("sample_rows", 1)):
        assert not slot.device[name][start:].any()


def test_a_decode_step_is_one_copy_with_its_page_updates(steps: Steps, copies: list[int]) -> None:
    batch = steps.decode(3, num_new_pages=2)
    steps.inputs.load_decode(batch, 4)
    assert len(copies) == 1
    for req in batch.reqs:
        row = steps.context.page_table[req.table_idx, :2]
        assert row.tolist() == steps.page_table[req.table_idx, :2].tolist()


def test_page_updates_that_do_not_fit_beside_a_step_go_by_themselves(
    steps: Steps, copies: list[int]
) -> None:
    batch = steps.decode(NUM_ROWS, num_new_pages=MAX_PAGES)
    tensors = steps.inputs.load_decode(batch, NUM_ROWS)
    assert len(copies) == 2
    assert steps.context.page_table[:NUM_ROWS].tolist() == steps.page_table.tolist()
    width = MAX_PAGES * PAGE_SIZE
    assert values(tensors.token_loc) == [req.table_idx * width + 9 for req in batch.reqs]


def test_larger_steps_find_larger_buffers(steps: Steps, copies: list[int]) -> None:
    batch = steps.batch([(0, MAX_PAGES * PAGE_SIZE - 1)] * NUM_ROWS)
    steps.inputs._bulk = GrowingStaging(CPU, num_bytes=64)
    steps.inputs.load_prefill(batch)
    assert len(copies) == 1
    assert copies[0] > 64
    assert values(batch.positions) == list(range(MAX_PAGES * PAGE_SIZE - 1)) * NUM_ROWS
