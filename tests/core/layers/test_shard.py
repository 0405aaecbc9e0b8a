from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.errors import ModelError
from minisgl.layers.shard import Shard, split_evenly, split_heads, split_padded


def test_even_parts_follow_each_other() -> None:
    parts = [split_evenly("width", 12, rank, 3) for rank in range(3)]
    assert parts == [Shard(0, 4, 4), Shard(4, 4, 4), Shard(8, 4, 4)]


def test_a_width_that_does_not_divide_is_named() -> None:
    with pytest.raises(ModelError, match="--tp 5: must divide the model's width, which is 12"):
        split_evenly("width", 12, 0, 5)


@given(total=st.integers(1, 300), num_ranks=st.integers(1, 16))
def test_padded_parts_are_equal_and_hold_everything_once(total: int, num_ranks: int) -> None:
    parts = [split_padded(total, rank, num_ranks) for rank in range(num_ranks)]
    assert len({part.size for part in parts}) == 1
    assert sum(part.num_real for part in parts) == total
    held = [i for part in parts for i in range(part.start, part.start + part.num_real)]
    assert held == list(range(total))


@given(
    group=st.integers(1, 8),
    num_kv_heads=st.integers(1, 8),
    num_ranks=st.sampled_from([1, 2, 3, 4, 6, 8]),
)
def test_each_rank_has_the_kv_heads_of_its_query_heads(
    group: int, num_kv_heads: int, num_ranks: int
) -> None:
    num_qo_heads = group * num_kv_heads
    try:
        shards = [split_heads(num_qo_heads, num_kv_heads, r, num_ranks) for r in range(num_ranks)]
    except ModelError:
        is_divided = num_kv_heads % num_ranks == 0 or num_ranks % num_kv_heads == 0
        assert num_qo_heads % num_ranks or not is_divided
        return
    for shard in shards:
        local_group = shard.q.size // shard.kv.size
        assert shard.q.size % shard.kv.size == 0
        for i in range(shard.q.size):
            assert (shard.q.start + i) // group == shard.kv.start + i // local_group
