"""The conformance suite of caches catches broken caches and says what the contract wants."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.kvcache.contract import PrefixCache
from tests.contract import broken_caches as broken
from tests.contract.suite_runs import path_of, run_suite

# What a run has to say about each fault.
FAULTS: list[tuple[type[PrefixCache], str]] = [
    (broken.HasNoCheck, "check_integrity returns every page that the cache owns"),
    (broken.LeavesTheMatchedNodeUnlocked, "counts the pages under a lock as protected"),
    (broken.SplitMakesTheTailYoung, "does not make the tail younger"),
    (broken.SplitLeavesTheHeadOld, "AB was matched after XY"),
    (broken.KeepsTheCallersPages, "returns the pages that were inserted for these tokens"),
    (broken.HandsOutItsOwnPages, "returns the pages that were inserted for these tokens"),
    (broken.CountsSplitPagesTwice, "sizes() counts the pages"),
    (broken.ComparesTheFirstTokenOfEachPage, "finds the longest known prefix in whole pages"),
    (broken.CountsTokensOfHalfPages, "handle.cached_len is the tokens of the returned pages"),
    (broken.LeaksALock, "sizes() counts the pages under a lock as protected"),
    (broken.UnlocksAnything, "unlock refuses a handle that is not locked"),
    (broken.LocksWhatIsGone, "lock refuses a handle whose prefix was evicted"),
    (broken.LosesLocksOnSplit, "evict never gives up a page of a locked prefix"),
    (broken.TakesWhatItKnew, "num_known_pages counts the leading pages"),
    (broken.OwnsOnePageTwice, "each once"),
    (broken.EvictsLockedPages, "evict never gives up a page of a locked prefix"),
    (broken.EvictsOnePageTooFew, "evict gives up at least what was asked for"),
    (broken.EvictsWhatItCanAndThenRefuses, "check_integrity returns every page"),
    (broken.FindsEvictedPages, "check_integrity returns every page"),
    (broken.RemembersEveryPrompt, "a cache forgets what it evicted"),
    (broken.SplitsIntoViews, "parts are copied, not viewed"),
    (broken.LocksOnceOnly, "sizes() counts the pages under a lock as protected"),
]


@pytest.mark.parametrize(
    ("cache", "sentence"), FAULTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_the_suite_names_the_rule_that_a_broken_cache_breaks(
    tmp_path: Path, cache: type[PrefixCache], sentence: str
) -> None:
    failures = run_suite(
        tmp_path, f"cache:{path_of(cache)}", "-k", "not page2 and not page16 and not page64"
    )
    assert failures
    assert sentence in failures[0]


def test_the_suite_passes_a_cache_that_is_right(tmp_path: Path) -> None:
    assert run_suite(tmp_path, f"cache:{path_of(broken.UncheckedCache)}", "-k", "page4") == []
