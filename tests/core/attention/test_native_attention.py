"""The native attention backend against float64 attention, and against the torch backend.

float32 with sums of at most 1500 products of order one: results are within 2e-5.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from minisgl.attention.contract import AttentionBackend
from minisgl.attention.native_backend import NativeAttentionBackend
from minisgl.attention.torch_backend import TorchAttentionBackend
from minisgl.core import Batch
from minisgl.native.library import unavailable_reason
from minisgl.testing.attention_case import AttentionCase, AttentionShape
from minisgl.testing.paged_batches import Step

pytestmark = pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"no native code: {unavailable_reason()}"
)

TOLERANCE = 2e-5
PREFILL = (Step(3, 0, 37), Step(0, 0, 1), Step(5, 64, 97), Step(1, 71, 72), Step(2, 130, 300))
LENS = (1, 16, 17, 64, 65, 300, 129)
HEADS = ((3, 3), (4, 2), (3, 1), (7, 1), (16, 2))


@pytest.fixture(params=[1, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """With several threads keys are cut into chunks, and partial results merged."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def decode_steps(lens: Sequence[int]) -> list[Step]:
    return [Step(row, length - 1, length) for row, length in enumerate(lens)]


def attend(backend: AttentionBackend, batch: Batch, q: torch.Tensor, layer: int) -> torch.Tensor:
    backend.prepare_metadata(batch)
    return backend.forward(q, layer, batch)


def check(case: AttentionCase, batch: Batch) -> None:
    """Compare every layer, which have a window each, with float64."""
    backend = NativeAttentionBackend(case.config())
    assert batch.positions is not None
    for layer_id in range(len(case.shape.windows)):
        q = case.queries(len(batch.positions))
        out = attend(backend, batch, q, layer_id)
        expected = case.expected(q, batch, layer_id)
        torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE, atol=TOLERANCE)


def check_like_torch(case: AttentionCase, steps: Sequence[Step], make_batch: str) -> None:
    """Compare with the torch backend, where the case itself does not know the truth."""
    batches: list[Batch] = [getattr(case, make_batch)(steps) for _ in range(2)]
    config = case.config()
    backends = (NativeAttentionBackend(config), TorchAttentionBackend(config))
    assert batches[0].positions is not None
    q = case.queries(len(batches[0].positions))
    out, expected = (
        attend(backend, batch, q, 0) for backend, batch in zip(backends, batches, strict=True)
    )
    torch.testing.assert_close(out, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: f"{heads[0]}over{heads[1]}")
def test_ragged_prefill_of_every_page_size_and_head_ratio(
    page_size: int, heads: tuple[int, int]
) -> None:
    case = AttentionCase(AttentionShape(*heads, head_dim=24, page_size=page_size))
    check(case, case.prefill(PREFILL))


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: f"{heads[0]}over{heads[1]}")
def test_ragged_decode_of_every_page_size_and_head_ratio(
    page_size: int, heads: tuple[int, int]
) -> None:
    case = AttentionCase(AttentionShape(*heads, head_dim=24, page_size=page_size))
    check(case, case.decode(decode_steps(LENS)))


@pytest.mark.parametrize("head_dim", [8, 40, 64, 80, 96, 128, 256])
def test_head_dimensions_that_are_no_multiple_of_a_vector(head_dim: int) -> None:
    case = AttentionCase(AttentionShape(6, 2, head_dim))
    check(case, case.prefill(PREFILL))
    check(case, case.decode(decode_steps(LENS)))


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_windows_of_all_sizes(phase: str, num_threads: int) -> None:
    case = AttentionCase(AttentionShape(6, 2, 32, windows=(0, 1, 5, 63, 64, 200, 1000, -1)))
    batch = case.prefill(PREFILL) if phase == "prefill" else case.decode(decode_steps(LENS))
    check(case, batch)


def test_a_long_prompt(num_threads: int) -> None:
    case = AttentionCase(AttentionShape(9, 3, 64, max_seq_len=700, max_reqs=1))
    check(case, case.prefill([Step(0, 0, 700)]))


def test_a_short_chunk_behind_a_long_prefix(num_threads: int) -> None:
    case = AttentionCase(AttentionShape(4, 1, 64, max_seq_len=1500, max_reqs=1))
    check(case, case.prefill([Step(0, 1483, 1500)]))


def test_one_long_request_in_decode(num_threads: int) -> None:
    case = AttentionCase(AttentionShape(8, 2, 64, max_seq_len=1500, max_reqs=1))
    check(case, case.decode(decode_steps([1500])))


def test_queries_whose_heads_are_not_adjacent() -> None:
    case = AttentionCase(AttentionShape(4, 2, 16))
    batch = case.decode(decode_steps([20, 3]))
    q = case.queries(2).transpose(0, 1).contiguous().transpose(0, 1)
    out = attend(NativeAttentionBackend(case.config()), batch, q, 0)
    torch.testing.assert_close(out.double(), case.expected(q, batch), rtol=2e-5, atol=2e-5)


def shared_case(lens: Sequence[int], sharing: Sequence[tuple[int, int, int]]) -> AttentionCase:
    """Make requests of which ``row`` takes its first ``num_pages`` pages from ``origin``."""
    case = AttentionCase(
        AttentionShape(6, 2, 32, page_size=4, max_seq_len=max(lens), max_reqs=len(lens))
    )
    for row, origin, num_pages in sharing:
        table = case.batches.page_table
        table[row, :num_pages] = table[origin, :num_pages]
    case.context.page_table[: len(lens)] = torch.from_numpy(case.batches.page_table)
    return case


SHARED = {
    "all share one prefix": ([150, 131, 129, 180], [(1, 0, 32), (2, 0, 32), (3, 0, 32)]),
    "a part of the batch does": ([900, 420, 410, 5, 430], [(1, 0, 100), (2, 0, 100), (4, 0, 100)]),
    "two clusters": ([400, 410, 300, 310], [(1, 0, 90), (3, 2, 70)]),
    "a prefix within a prefix": (
        [600, 600, 600, 600, 90],
        [(1, 0, 140), (2, 0, 50), (3, 2, 130), (4, 0, 20)],
    ),
    "each keeps its newest page": ([400, 256, 300], [(1, 0, 63), (2, 0, 64)]),
    "too little to pay": ([30, 31], [(1, 0, 4)]),
    "more than one unit holds": ([140 + i for i in range(70)], [(i, 0, 30) for i in range(1, 70)]),
}


@pytest.mark.parametrize("name", SHARED)
def test_shared_prefixes(name: str, num_threads: int) -> None:
    lens, sharing = SHARED[name]
    case = shared_case(lens, sharing)
    check_like_torch(case, decode_steps(lens), "decode")


def test_a_prefill_of_one_token_each_shares_prefixes_too() -> None:
    case = shared_case([200, 190, 150], [(1, 0, 40), (2, 0, 35)])
    check_like_torch(case, [Step(0, 199, 200), Step(1, 189, 190), Step(2, 100, 150)], "prefill")


def test_the_keys_of_a_shared_prefix_are_planned_once() -> None:
    case = shared_case([544] * 8, [(row, 0, 128) for row in range(1, 8)])
    batch = case.decode(decode_steps([544] * 8))
    NativeAttentionBackend(case.config()).prepare_metadata(batch)
    plan = batch.attn_metadata.plans[-1].numpy()
    # A header of 8 numbers, then units of 10, in which 3 and 4 are the bounds of the keys.
    units = plan[8 : 8 + 10 * plan[0]].reshape(-1, 10)
    assert int(np.sum(units[:, 4] - units[:, 3])) == 512 + 8 * 32
