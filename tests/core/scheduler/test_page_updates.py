"""What the engine is told of the page table: each changed place once, with its newest page."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.cache_manager import CacheManager
from minisgl.scheduler.contract import ScheduledReq
from minisgl.testing.fake_engine import make_limits
from tests.core.scheduler.harness import make_cache

PAGE_SIZE = 4


@pytest.fixture
def cache() -> CacheManager:
    return CacheManager(make_cache("radix", PAGE_SIZE), make_limits(page_size=PAGE_SIZE))


def admit(cache: CacheManager, row: int, num_pages: int) -> ScheduledReq:
    num_tokens = num_pages * PAGE_SIZE
    prompt = np.full(num_tokens, row, dtype=np.int32)
    req = ScheduledReq(row, prompt, num_tokens + 1, SamplingParams())
    req.table_idx = row
    assert cache.admit(req, cache.match(req), num_pages, num_spare=0)
    return req


def announced(cache: CacheManager) -> dict[tuple[int, int], int]:
    """Take the updates, by place."""
    updates = cache.take_updates()
    assert {array.dtype for array in updates} == {np.dtype(np.int32)}
    places = list(zip(updates.rows.tolist(), updates.cols.tolist(), strict=True))
    assert len(set(places)) == len(places), "a place occurs twice"
    return dict(zip(places, updates.ids.tolist(), strict=True))


def test_rows_filled_for_one_step_are_announced_together_and_once(cache: CacheManager) -> None:
    pages = {3: 5, 0: 1, 2: 7}  # by row
    for row, num_pages in pages.items():
        admit(cache, row, num_pages)
    assert announced(cache) == {
        (row, col): cache.page_table[row, col] for row in pages for col in range(pages[row])
    }
    assert not announced(cache)


def test_a_row_that_changes_hands_before_the_step_is_announced_as_it_is(
    cache: CacheManager,
) -> None:
    cache.release(admit(cache, 1, 6), is_valid=False)
    assert not announced(cache)
    cache.release(admit(cache, 1, 6), is_valid=False)
    admit(cache, 1, 2)
    assert announced(cache) == {(1, col): cache.page_table[1, col] for col in range(2)}


def test_grown_and_filled_rows_are_announced_together(cache: CacheManager) -> None:
    req = admit(cache, 1, 2)
    cache.take_updates()
    assert cache.grow([req], np.array([1], np.int32), np.array([2 * PAGE_SIZE], np.int32))
    admit(cache, 4, 1)
    assert announced(cache) == {(1, 2): cache.page_table[1, 2], (4, 0): cache.page_table[4, 0]}
