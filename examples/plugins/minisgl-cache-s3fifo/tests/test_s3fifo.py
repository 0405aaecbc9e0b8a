"""The cache against the contract, and what sets it apart from one that follows the order of use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from minisgl import LLM, SamplingParams
from minisgl.kvcache.contract import CacheConfig, PrefixCache
from minisgl.plugin.manager import PluginManager
from minisgl.plugin.spec import ProbeContext
from minisgl.testing.tiny_checkpoint import write_tiny_checkpoint

NUM_PAGES = 100


class Prompts:
    """Sends prompts of one page each through a cache with room for `NUM_PAGES`."""

    def __init__(self, name: str) -> None:
        picked = PluginManager.bootstrap().resolve("cache", name, ProbeContext()).one
        self.cache: PrefixCache = picked.build(CacheConfig(page_size=1))
        self._free = list(range(NUM_PAGES))

    def ask(self, *token_ids: int) -> int:
        """Look up, compute what is missing, and insert; returns the pages that were known."""
        tokens = np.array(token_ids, dtype=np.int32)
        handle, known = self.cache.match_prefix(tokens)
        self.cache.lock(handle)
        num_missing = len(tokens) - len(known)
        if num_missing > len(self._free):
            self._free += self.cache.evict(num_missing - len(self._free)).tolist()
        pages = np.array([*known, *self._free[:num_missing]], dtype=np.int32)
        del self._free[:num_missing]
        self._free += self.cache.insert_prefix(tokens, pages).not_taken(pages).tolist()
        self.cache.unlock(handle)
        self.cache.check_integrity()
        return len(known)


def test_it_conforms(tmp_path: Path) -> None:
    suite = ["--pyargs", "minisgl.testing", "--backend", "cache:s3fifo", "-m", "not recency"]
    command = [sys.executable, "-m", "pytest", "-q", *suite]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def flooded(name: str) -> int:
    """Use 50 prompts three times, flood the cache with others, and count those still known."""
    prompts = Prompts(name)
    for _ in range(3):
        for token in range(50):
            prompts.ask(token)
    for token in range(1000, 1500):
        prompts.ask(token)
    return sum(prompts.ask(token) for token in range(50))


def test_prompts_that_come_once_do_not_flush_those_that_come_often() -> None:
    assert flooded("s3fifo") == 50
    assert flooded("radix") == 0


def test_who_comes_back_soon_after_eviction_has_left_probation() -> None:
    prompts = Prompts("s3fifo")
    for token in range(NUM_PAGES + 20):
        prompts.ask(token)
    assert prompts.ask(0) == 0, "the first ones have gone"
    for token in range(1000, 1000 + NUM_PAGES):
        prompts.ask(token)
    assert prompts.ask(0) == 1, "the second time it went to main, which a flood does not reach"


def test_a_prefix_outlives_its_continuations() -> None:
    prompts = Prompts("s3fifo")
    prompts.ask(1, 2, 3, 4)
    for token in range(1000, 1000 + NUM_PAGES - 2):
        prompts.ask(token)
    assert prompts.ask(1, 2, 3, 4) == 2


@pytest.mark.parametrize("small_share", [0.01, 0.9])
def test_it_changes_no_result(tmp_path: Path, small_share: float) -> None:
    folder = write_tiny_checkpoint(tmp_path)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    words = ["the quick brown fox " * 2, "the quick brown dog", "jumps over " * 3]
    answers = []
    for cache in ("naive", "s3fifo"):
        settings = {"s3fifo": {"small_share": small_share}}
        model = LLM(
            str(folder), dummy_weight=True, num_pages=24, page_size=4, cache=cache, **settings
        )
        with model as llm:
            outputs = [llm.generate([word], params)[0] for word in words * 4]
        answers.append([output["token_ids"] for output in outputs])
    assert answers[0] == answers[1]
