"""What every prefix cache has to do; see `minisgl.kvcache.contract`.

`CheckedCache` compares each call with a model, so most tests here only have to bring a cache into
a situation. Letters stand for pages: ``"AB"`` is a prefix of two pages.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from minisgl.errors import MinisglError
from minisgl.kvcache.contract import CacheConfig, PrefixCache
from minisgl.testing.cache_machine import make_cache_machine, page_tokens
from minisgl.testing.cache_model import CheckedCache, Known
from minisgl.testing.selection import TestedBackend

PAGE_SIZES = (1, 2, 4, 16, 64)

# Fixed examples, so that two runs on one cache agree.
_MACHINE = settings(
    max_examples=60,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(params=PAGE_SIZES, ids=lambda size: f"page{size}")
def page_size(request: pytest.FixtureRequest) -> int:
    size: int = request.param
    return size


@pytest.fixture
def build(backend: TestedBackend, page_size: int) -> Callable[[], PrefixCache]:
    """Make an empty cache."""

    def build_cache() -> PrefixCache:
        cache: PrefixCache = backend.build(CacheConfig(page_size=page_size))
        return cache

    return build_cache


@pytest.fixture
def checked(build: Callable[[], PrefixCache], page_size: int) -> CheckedCache:
    return CheckedCache(build(), page_size)


@pytest.fixture
def taking(checked: CheckedCache) -> CheckedCache:
    """A cache that takes pages; it is empty again."""
    insert(checked, "Z")
    if checked.num_owned == 0:
        pytest.skip("this cache takes no pages")
    checked.evict_all()
    return checked


def tokens_of(checked: CheckedCache, letters: str) -> np.ndarray:
    return page_tokens(checked.page_size, [ord(letter) - ord("A") for letter in letters])


def insert(checked: CheckedCache, letters: str) -> Known:
    return checked.insert(tokens_of(checked, letters))


def match(checked: CheckedCache, letters: str) -> Known:
    return checked.match(tokens_of(checked, letters))


def num_known(checked: CheckedCache, letters: str) -> int:
    return len(match(checked, letters).pages)


def test_an_empty_cache_knows_nothing(checked: CheckedCache) -> None:
    assert num_known(checked, "AB") == 0, "an empty cache knows no prefix"


def test_the_empty_prefix_can_be_locked(checked: CheckedCache) -> None:
    known = match(checked, "")
    checked.lock(known)
    checked.unlock(known)


def test_inserted_pages_are_found_again(checked: CheckedCache) -> None:
    insert(checked, "ABC")
    for letters in ("ABC", "AB", "ABCD", "ABD", "B"):
        match(checked, letters)


@pytest.mark.parametrize("num_tokens_off", [-1, 0, 1])
def test_a_match_is_whole_pages_only(checked: CheckedCache, num_tokens_off: int) -> None:
    insert(checked, "ABC")
    num_tokens = 2 * checked.page_size + num_tokens_off
    checked.match(tokens_of(checked, "ABC")[:num_tokens])


def test_pages_that_differ_in_one_token_are_different(checked: CheckedCache) -> None:
    tokens = tokens_of(checked, "ABCA")
    checked.insert(tokens)
    for index in range(len(tokens)):
        other = tokens.copy()
        other[index] += 1
        checked.match(other)


def test_known_tokens_keep_their_pages(taking: CheckedCache) -> None:
    first = insert(taking, "AB")
    again = insert(taking, "ABC")
    assert again.pages[:2].tolist() == first.pages.tolist(), "what was known keeps its pages"


def test_a_prefix_that_is_inserted_twice_is_taken_once(taking: CheckedCache) -> None:
    insert(taking, "ABC")
    num_owned = taking.num_owned
    insert(taking, "ABC")
    assert taking.num_owned == num_owned, "an insertion of known tokens takes no page"


def test_pages_that_came_from_the_cache_are_not_handed_back(taking: CheckedCache) -> None:
    known = insert(taking, "AB")
    taking.lock(known)
    own = taking.allocator.allocate(2)
    _, result = taking.offer(tokens_of(taking, "ABCD"), np.concatenate((known.pages, own)))
    assert len(result.not_taken(np.concatenate((known.pages, own)))) == 0, (
        "pages that the caller had from the cache stay the cache's"
    )


def test_the_cache_keeps_copies_of_its_input(checked: CheckedCache) -> None:
    tokens = tokens_of(checked, "ABC")
    offered = checked.allocator.allocate(3)
    checked.offer(tokens, offered)
    tokens[:] = 77
    offered[:] = 63
    match(checked, "ABC")
    checked.evict_all()


def test_results_are_copies(checked: CheckedCache) -> None:
    insert(checked, "ABC").pages[:] = 63
    checked.check()
    match(checked, "ABC").pages[:] = 63
    match(checked, "ABC")


def test_a_locked_prefix_survives_eviction(taking: CheckedCache) -> None:
    insert(taking, "ABCD")
    known = match(taking, "ABCD")
    taking.lock(known)
    taking.evict_all()
    assert num_known(taking, "ABCD") == 4, "a locked prefix stays, its last page included"
    taking.unlock(known)
    assert len(taking.evict_all()) == 4, "an unlocked prefix can be evicted"


def test_a_lock_covers_the_prefix_and_nothing_behind_it(taking: CheckedCache) -> None:
    insert(taking, "ABCD")
    taking.lock(match(taking, "AB"))
    assert len(taking.evict_all()) == 2, "pages behind a locked prefix can be evicted"


def test_locks_nest(taking: CheckedCache) -> None:
    known = insert(taking, "AB")
    taking.lock(known)
    taking.lock(known)
    taking.unlock(known)
    taking.evict_all()
    assert num_known(taking, "AB") == 2, "a prefix that was locked twice needs two unlocks"


@pytest.mark.parametrize("visitor", ["AB", "ABX", "ABCDX", "X"])
def test_a_lock_survives_what_others_insert_and_match(taking: CheckedCache, visitor: str) -> None:
    known = insert(taking, "ABCD")
    taking.lock(known)
    match(taking, visitor)
    insert(taking, visitor)
    insert(taking, "Q")
    taking.evict_all()
    assert num_known(taking, "ABCD") == 4, "a handle stays good while it is locked"
    taking.unlock(known)


def test_a_handle_can_be_locked_after_its_prefix_was_split(taking: CheckedCache) -> None:
    known = insert(taking, "ABCD")
    insert(taking, "ABX")
    taking.lock(known)
    taking.evict_all()
    assert num_known(taking, "ABCD") == 4, "only an eviction ends an unlocked handle"


def test_two_locks_on_one_path_are_independent(taking: CheckedCache) -> None:
    outer, inner = match_both(taking)
    taking.unlock(inner)
    assert len(taking.evict_all()) == 2, "the shorter prefix is still locked"
    taking.unlock(outer)
    assert len(taking.evict_all()) == 2, "both locks were taken back"


def match_both(checked: CheckedCache) -> tuple[Known, Known]:
    """Lock AB and ABCD."""
    insert(checked, "ABCD")
    outer, inner = match(checked, "AB"), match(checked, "ABCD")
    checked.lock(outer)
    checked.lock(inner)
    return outer, inner


def test_unlocking_what_is_not_locked_is_refused(taking: CheckedCache) -> None:
    known = insert(taking, "AB")
    with refusing("unlock refuses a handle that is not locked"):
        taking.cache.unlock(known.handle)
    taking.check()


def test_locking_what_was_evicted_is_refused(taking: CheckedCache) -> None:
    known = insert(taking, "AB")
    taking.evict_all()
    with refusing("lock refuses a handle whose prefix was evicted"):
        taking.cache.lock(known.handle)
    taking.check()


@contextmanager
def refusing(rule: str) -> Iterator[None]:
    """Want an `IntegrityError`, or the assertion that a cache may have in its place."""
    try:
        yield
    except (MinisglError, AssertionError):
        return
    pytest.fail(f"{rule}, with an IntegrityError")


def test_evicting_more_than_is_evictable_changes_nothing(taking: CheckedCache) -> None:
    insert(taking, "ABC")
    taking.lock(match(taking, "A"))
    taking.evict(3)
    assert num_known(taking, "ABC") == 3, "a refused eviction changes nothing"


def test_evicted_pages_are_never_found_again(taking: CheckedCache) -> None:
    for letters in ("AB", "BA", "AC", "CA") * 8:
        insert(taking, letters)
        taking.evict(2)
        match(taking, letters)
        match(taking, letters[0])


def test_shared_pages_are_counted_once(taking: CheckedCache) -> None:
    for letters in ("ABCD", "ABXY", "ABCX", "AB", "Q"):
        insert(taking, letters)
    assert taking.num_owned == 8, "prefixes share the pages that they have in common"


@pytest.mark.recency
def test_the_used_head_outlives_its_unused_tail(taking: CheckedCache) -> None:
    insert(taking, "ABCD")
    insert(taking, "XY")
    match(taking, "AB")
    taking.evict(2)
    assert num_known(taking, "ABCD") == 2, (
        "a match of the head does not make the tail younger: CD was used before XY"
    )


@pytest.mark.recency
def test_a_match_makes_the_head_younger(taking: CheckedCache) -> None:
    insert(taking, "ABCD")
    insert(taking, "XY")
    match(taking, "AB")
    taking.evict(4)
    known = {letters: num_known(taking, letters) for letters in ("AB", "XY")}
    assert known == {"AB": 2, "XY": 0}, "AB was matched after XY was inserted"


@pytest.mark.recency
def test_an_insertion_makes_the_head_younger_and_not_the_other_tail(taking: CheckedCache) -> None:
    insert(taking, "ABCD")
    insert(taking, "XY")
    insert(taking, "ABQ")
    taking.evict(4)
    known = {letters: num_known(taking, letters) for letters in ("ABQ", "ABCD", "XY")}
    assert known == {"ABQ": 3, "ABCD": 2, "XY": 0}, "least recently used first: CD, then XY"


@pytest.mark.recency
def test_the_least_recently_used_goes_first(taking: CheckedCache) -> None:
    for letter in "ABCDEF":
        insert(taking, letter)
    for letter in "BDA":
        match(taking, letter)
    for gone in "CEFBDA":
        taking.evict(1)
        assert num_known_quietly(taking, gone) == 0, f"{gone} was the least recently used"


def num_known_quietly(checked: CheckedCache, letters: str) -> int:
    """Look whether one page is owned without using it."""
    return int(checked.owns(tokens_of(checked, letters)))


@pytest.mark.parametrize("page_size", [1, 16], indirect=True)
def test_a_very_deep_prefix_can_be_built_page_by_page(taking: CheckedCache) -> None:
    tokens = np.arange(1200 * taking.page_size, dtype=np.int32)
    pages = np.arange(1200, dtype=np.int32)
    cache = taking.cache
    for num_pages in range(1, 1201):
        cache.insert_prefix(tokens[: num_pages * taking.page_size], pages[:num_pages])
    handle = cache.match_prefix(tokens).handle
    cache.lock(handle)
    cache.unlock(handle)
    assert len(cache.check_integrity()) == 1200, "a prefix may be as deep as there are pages"
    assert len(cache.evict(1200)) == 1200, "a deep prefix can be evicted"


def test_memory_does_not_grow_with_the_prompts_seen(taking: CheckedCache) -> None:
    cache, page_size = taking.cache, taking.page_size

    def serve(first: int, count: int) -> None:
        for uid in range(first, first + count):
            tokens = np.full(page_size, uid, dtype=np.int32)
            cache.insert_prefix(tokens, np.array([uid % 8], dtype=np.int32))
            cache.evict(1)

    serve(0, 200)
    growth = traced_growth(lambda: serve(1000, 1000))
    assert growth < 40_000, (
        f"a cache forgets what it evicted: 1000 evicted prompts left {growth} bytes behind"
    )


def test_a_short_rest_does_not_keep_a_long_prefix_in_memory(taking: CheckedCache) -> None:
    cache, page_size = taking.cache, taking.page_size
    num_pages = 65536 // page_size
    held: list[object] = []

    def keep_one_page() -> None:
        tokens = np.arange(num_pages * page_size, dtype=np.int32)
        cache.insert_prefix(tokens, np.arange(num_pages, dtype=np.int32))
        handle = cache.match_prefix(tokens[:page_size]).handle
        cache.lock(handle)
        held.append(handle)
        cache.evict(num_pages - 1)

    growth = traced_growth(keep_one_page)
    assert growth < 65536, (
        "a cache owns no more memory than its pages need: parts are copied, not viewed; one page "
        f"of {page_size} tokens holds {growth} bytes"
    )


def traced_growth(action: Callable[[], None]) -> int:
    """Return the bytes that an action left allocated."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        action()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return after - before


def test_random_calls_agree_with_the_model(
    build: Callable[[], PrefixCache], page_size: int
) -> None:
    run_state_machine_as_test(make_cache_machine(build, page_size), settings=_MACHINE)
