from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.errors import CapacityError, IntegrityError
from minisgl.kvcache.pages import PageAllocator


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def test_a_fresh_pool_is_handed_out_in_ascending_order() -> None:
    allocator = PageAllocator(5)
    assert allocator.allocate(2).tolist() == [0, 1]
    assert allocator.allocate(3).tolist() == [2, 3, 4]
    assert allocator.num_free == 0


def test_pages_are_int32_and_the_callers_own() -> None:
    allocator = PageAllocator(4)
    taken = allocator.allocate(3)
    assert taken.dtype == np.int32
    taken[:] = 9
    assert allocator.allocate(1).tolist() == [3]


def test_what_was_freed_last_is_handed_out_first_in_the_same_order() -> None:
    allocator = PageAllocator(6)
    allocator.allocate(6)
    allocator.free(pages(1, 2))
    allocator.free(pages(5, 0))
    assert allocator.allocate(4).tolist() == [5, 0, 1, 2]


def test_asking_for_too_much_changes_nothing() -> None:
    allocator = PageAllocator(3)
    allocator.allocate(1)
    with pytest.raises(CapacityError, match="allocate 3 pages: only 2 are free"):
        allocator.allocate(3)
    assert allocator.allocate(2).tolist() == [1, 2]


def test_no_page_may_be_asked_for_and_freed() -> None:
    allocator = PageAllocator(0)
    assert allocator.allocate(0).shape == (0,)
    allocator.free(pages())
    assert allocator.num_free == 0


@pytest.mark.parametrize(
    ("freed", "message"),
    [
        ([2], "free pages 2: they are free already"),
        ([0, 2, 3], "free pages 2, 3: they are free already"),
        ([1, 0, 1], "free pages 1: given more than once"),
        ([1] * 9, "free pages 1: given more than once"),
        ([4], "free pages 4: pages are 0 to 3"),
        ([-1], "free pages -1: pages are 0 to 3"),
    ],
)
def test_a_wrong_page_is_refused_and_nothing_is_changed(freed: list[int], message: str) -> None:
    allocator = PageAllocator(4)
    allocator.allocate(2)
    with pytest.raises(IntegrityError, match=message):
        allocator.free(pages(*freed))
    allocator.check_integrity()
    assert sorted(allocator.free_pages().tolist()) == [2, 3]


def test_a_strided_view_can_be_freed() -> None:
    allocator = PageAllocator(6)
    taken = allocator.allocate(6)
    allocator.free(taken[::2])
    assert sorted(allocator.free_pages().tolist()) == [0, 2, 4]


def test_the_check_finds_a_stack_that_was_written_over() -> None:
    allocator = PageAllocator(4)
    allocator._stack[0] = 1
    with pytest.raises(IntegrityError, match="pages 3 are marked and listed unlike"):
        allocator.check_integrity()


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.lists(st.integers(-9, 9), max_size=40))
def test_random_use_never_loses_or_doubles_a_page(amounts: list[int]) -> None:
    allocator = PageAllocator(16)
    held: list[int] = []
    for amount in amounts:
        if 0 <= amount <= allocator.num_free:
            held += allocator.allocate(amount).tolist()
        elif amount < 0:
            given_back, held = held[:-amount], held[-amount:]
            allocator.free(pages(*given_back))
        allocator.check_integrity()
        assert sorted([*held, *allocator.free_pages().tolist()]) == list(range(16))
