"""Random calls on a prefix cache, by a hypothesis state machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from minisgl.errors import CapacityError
from minisgl.kvcache.contract import PrefixCache
from minisgl.testing.cache_model import CheckedCache

# Three different pages and up to six in a row: prefixes meet, part and nest all the time.
_PAGES = st.lists(st.integers(0, 2), max_size=6)


def page_tokens(page_size: int, letters: Sequence[int]) -> np.ndarray:
    """Make tokens of whole pages.

    Args:
        page_size: Tokens of a page.
        letters: One small number per page; pages of different letters differ in a few tokens
            only, at the end or in the middle.

    Returns:
        ``[len(letters) * page_size]`` int32.
    """
    tokens = np.zeros((len(letters), page_size), dtype=np.int32)
    for row, letter in enumerate(letters):
        tokens[row, -1 - (letter * 5) % page_size] = letter + 1
    return tokens.reshape(-1)


class CacheMachine(RuleBasedStateMachine):
    """Matches, inserts, locks, unlocks and evicts; `CheckedCache` compares after every step.

    A subclass made by `make_cache_machine` knows the cache and the page size.
    """

    build: Callable[[], PrefixCache]
    page_size: int

    def __init__(self) -> None:
        """Start with an empty cache and a pool of a few pages."""
        super().__init__()
        self.checked = CheckedCache(type(self).build(), self.page_size, num_pages=16)

    @rule(letters=_PAGES, num_more=st.integers(0, 63))
    def match(self, letters: list[int], num_more: int) -> None:
        """Match whole pages and part of one more."""
        self.checked.match(self._with_tail(letters, num_more))

    @rule(letters=_PAGES, num_more=st.integers(0, 63))
    def match_and_lock(self, letters: list[int], num_more: int) -> None:
        """Match and lock, as for a request that is admitted."""
        self.checked.lock(self.checked.match(self._with_tail(letters, num_more)))

    @rule(letters=_PAGES, is_locked=st.booleans())
    def insert(self, letters: list[int], is_locked: bool) -> None:
        """Insert with fresh pages, as for a prompt that was computed."""
        try:
            known = self.checked.insert(page_tokens(self.page_size, letters))
        except CapacityError:
            return  # the pool is empty
        if is_locked:
            self.checked.lock(known)

    @precondition(lambda self: self.checked.locked)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        """Unlock any of the locked prefixes."""
        self.checked.unlock(data.draw(st.sampled_from(self.checked.locked)))

    @precondition(lambda self: self.checked.locked)
    @rule(data=st.data())
    def lock_again(self, data: st.DataObject) -> None:
        """Lock a prefix that is locked already."""
        self.checked.lock(data.draw(st.sampled_from(self.checked.locked)))

    @rule(num_pages=st.integers(0, 8))
    def evict(self, num_pages: int) -> None:
        """Evict a few pages, or be refused."""
        self.checked.evict(num_pages)

    @rule()
    def evict_all(self) -> None:
        """Evict all that is not locked."""
        self.checked.evict_all()

    def teardown(self) -> None:
        """Release everything."""
        self.checked.close()

    def _with_tail(self, letters: list[int], num_more: int) -> np.ndarray:
        tokens = page_tokens(self.page_size, [*letters, 0])
        return tokens[: len(letters) * self.page_size + num_more % self.page_size]


def make_cache_machine(
    build: Callable[[], PrefixCache], page_size: int
) -> type[RuleBasedStateMachine]:
    """Make the machine for one cache and page size.

    Args:
        build: Makes an empty cache of that page size.
        page_size: Tokens of a page.
    """
    members = {"build": staticmethod(build), "page_size": page_size}
    return type("CacheMachine", (CacheMachine,), members)
