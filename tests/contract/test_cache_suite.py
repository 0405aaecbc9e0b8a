"""The conformance suite of caches catches broken caches and says what the contract wants."""

from __future__ import annotations

import pytest

from minisgl.kvcache.contract import PrefixCache
from tests.contract import broken_caches as broken

pytest_plugins = "pytester"

SUITE = "minisgl.testing.conformance.test_cache"

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


def run_suite(pytester: pytest.Pytester, cache: type[PrefixCache], *args: str) -> list[str]:
    """Run the suite against a cache until it fails; return what the failures say."""
    name = f"cache:{cache.__module__}:{cache.__name__}"
    run = pytester.inline_run(
        *("--pyargs", SUITE, f"--backend={name}", "-p", "minisgl.testing.plugin"),
        *("-x", "-q", "-p", "no:cacheprovider", *args),
    )
    passed, _, failed = run.listoutcomes()
    assert passed or failed
    return [report.longreprtext for report in failed]


@pytest.mark.parametrize(
    ("cache", "sentence"), FAULTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_the_suite_names_the_rule_that_a_broken_cache_breaks(
    pytester: pytest.Pytester, cache: type[PrefixCache], sentence: str
) -> None:
    failures = run_suite(pytester, cache, "-k", "not page2 and not page16 and not page64")
    assert failures
    assert sentence in failures[0]


def test_the_suite_passes_a_cache_that_is_right(pytester: pytest.Pytester) -> None:
    assert run_suite(pytester, broken.UncheckedCache, "-k", "page4 or page16") == []
