"""What requests want of the sampler, row by row."""

from __future__ import annotations

import numpy as np

from minisgl.core import Req, SamplingParams
from minisgl.engine.row_params import RowParams

VARIED = [
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=3),
    SamplingParams(temperature=1.0, seed=-1, min_tokens=4),
    SamplingParams(temperature=1.0, seed=2**64 - 1, logprobs=2),
    SamplingParams(temperature=1.0, top_p=0.5, presence_penalty=0.5),
]
ROWS = np.arange(len(VARIED))
EACH = [np.array([row]) for row in ROWS]


def make_reqs() -> list[Req]:
    reqs = [Req(10 + i, np.arange(3), 20, params) for i, params in enumerate(VARIED)]
    for i, req in enumerate(reqs):
        req.table_idx = i
    return reqs


def make_rows() -> RowParams:
    return RowParams(8, vocab_size=100, base_seed=7, is_always_edited=False)


def test_requests_admitted_together_are_as_if_one_by_one() -> None:
    together, single = make_rows(), make_rows()
    together.admit(make_reqs())
    for req in make_reqs():
        single.admit([req])
    for name, array in together.select(ROWS).items():
        assert array.tolist() == single.select(ROWS)[name].tolist()
    for row in EACH:
        assert together.hints(row) == single.hints(row)
        assert together.has_logprobs(row) == single.has_logprobs(row)


def test_each_row_has_the_parameters_of_its_request() -> None:
    rows = make_rows()
    rows.admit(make_reqs())
    selected = rows.select(ROWS)
    assert selected["temperature"].tolist() == [0, np.float32(0.7), 1, 1, 1]
    assert selected["top_k"].tolist() == [100, 5, 100, 100, 100]
    assert selected["seeds"][1:4].tolist() == [3, -1, -1]
    assert [rows.hints(row).top_width for row in EACH] == [0, 5, 0, 0, 100]
    assert rows.edited(ROWS, np.full(5, 3)).tolist() == [2, 4]
    assert [rows.has_logprobs(row) for row in EACH] == [False, False, False, True, False]


def test_a_minimum_beyond_every_sequence_is_never_reached() -> None:
    rows, params = make_rows(), SamplingParams(max_tokens=None, min_tokens=2**31 - 1)
    req = Req(0, np.arange(3), 20, params)
    req.table_idx = 0
    rows.admit([req])
    assert rows.edited(np.array([0]), np.array([2**31 - 2])).tolist() == [0]


def test_nobody_admitted_changes_nothing() -> None:
    rows = make_rows()
    rows.admit([])
    assert rows.is_all_greedy(ROWS)
