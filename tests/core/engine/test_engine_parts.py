"""The engine's small parts: packed buffers, graph sizes, memory."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from minisgl.config.sections import EngineSettings
from minisgl.engine.graph import GraphRunner, graph_sizes
from minisgl.engine.memory import MemoryBudget, count_pages
from minisgl.engine.packed import Field, PackedLayout, Staging, layout_of, packed_bytes
from minisgl.engine.prefill_graph import prefill_graph_sizes
from minisgl.errors import SettingsError
from minisgl.kvcache.pool import KVPool, PoolShape

CPU = torch.device("cpu")
SHAPE = PoolShape(num_layers=2, num_pages=0, page_size=4, num_kv_heads=2, head_dim=8)


def test_packed_fields_do_not_overlap_and_are_aligned() -> None:
    layout = PackedLayout(
        [Field("a", torch.int32, 3), Field("b", torch.int64, 5), Field("c", torch.float32, 1)]
    )
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    views = layout.views(buffer)
    for i, view in enumerate(views.values()):
        view.fill_(i + 1)
        assert (view.data_ptr() - buffer.data_ptr()) % 16 == 0
    assert [v.unique().tolist() for v in views.values()] == [[1], [2], [3]]


def test_a_layout_of_empty_fields_has_no_bytes() -> None:
    assert PackedLayout([Field("a", torch.int32, 0)]).num_bytes == 0


def test_a_layout_leaves_what_comes_before_it_alone() -> None:
    first = PackedLayout([Field("a", torch.int32, 3)])
    arrays: dict[str, np.ndarray] = {"b": np.arange(5), "c": np.ones(2, np.float32)}
    second = layout_of(arrays, start=first.num_bytes)
    assert second.num_bytes == first.num_bytes + packed_bytes(arrays)
    memory = np.zeros(second.num_bytes, np.uint8)
    for name, view in second.arrays(memory).items():
        view[:] = arrays[name]
    assert not first.arrays(memory)["a"].any()
    views = second.views(torch.from_numpy(memory))
    assert {name: view.tolist() for name, view in views.items()} == {
        name: array.tolist() for name, array in arrays.items()
    }


def test_staging_on_a_cpu_copies_nothing() -> None:
    staging = Staging(64, CPU)
    staging.host[staging.acquire()][:] = 7
    staging.submit(64)
    assert staging.device.tolist() == [7] * 64


@pytest.mark.parametrize(
    ("largest", "sizes"),
    [(0, ()), (-1, ()), (1, (1,)), (3, (1, 2, 3)), (12, (1, 2, 4, 8, 12)), (16, (1, 2, 4, 8, 16))],
)
def test_graph_sizes_end_with_the_largest(largest: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(largest) == sizes


def test_every_batch_up_to_the_largest_graph_finds_one_that_fits() -> None:
    runner = GraphRunner(graph_sizes(100))
    for n in range(1, 101):
        size = runner.padded_size(n)
        assert size is not None
        assert size >= n
    assert runner.padded_size(101) is None
    assert GraphRunner(()).padded_size(1) is None


def test_sizes_of_captured_prefills_waste_at_most_a_fifth_of_a_long_step() -> None:
    assert prefill_graph_sizes(0) == ()
    assert prefill_graph_sizes(5) == (5,)
    sizes = prefill_graph_sizes(8192)
    assert sizes[:6] == (64, 128, 192, 256, 320, 384)
    assert sizes[-5:] == (4096, 5120, 6144, 7168, 8192)
    assert all(b <= max(64 + a, 1.25 * a) for a, b in pairwise(sizes))


def test_pages_fill_the_bytes_given_but_no_more_than_rows_can_use() -> None:
    page_bytes = SHAPE.page_bytes(torch.float32)
    assert page_bytes == 2 * 2 * 2 * 8 * 4 * 4
    settings = EngineSettings.model_validate(
        {"cpu_kv_cache_bytes": 2**20, "max_running_requests": 4}
    )
    budget = MemoryBudget(CPU, 0)
    plenty = count_pages(budget, settings, SHAPE, torch.float32, max_seq_len=10**6)
    assert plenty == 2**20 // page_bytes - 1
    assert count_pages(budget, settings, SHAPE, torch.float32, max_seq_len=9) == 4 * 3


def test_no_room_for_a_page_names_the_flag() -> None:
    settings = EngineSettings.model_validate({"cpu_kv_cache_bytes": 2**20})
    huge = PoolShape(num_layers=64, num_pages=0, page_size=256, num_kv_heads=64, head_dim=128)
    with pytest.raises(SettingsError, match="--cpu-kv-cache-bytes: leaves no room"):
        count_pages(MemoryBudget(CPU, 0), settings, huge, torch.float32, 4096)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_pool_is_zero_and_slots_alias_pages(dtype: torch.dtype) -> None:
    pool = KVPool(PoolShape(2, 3, 4, 1, 2), dtype, CPU)
    assert pool.k_cache(1).shape == (4, 4, 1, 2)
    assert pool.dummy_page == 3
    assert not pool.v_cache(0).any()
    pool.k_slots(1)[6] = 5
    assert pool.k_cache(1)[1, 2].eq(5).all()
    assert not pool.k_cache(0).any()
