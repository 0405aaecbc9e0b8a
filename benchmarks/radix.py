"""Host cost of the radix cache and the page allocator.

Usage: python benchmarks/radix.py [--repeat N]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from minisgl.kvcache.contract import CacheConfig, CacheHandle
from minisgl.kvcache.pages import PageAllocator
from minisgl.kvcache.radix import RadixCache

PROMPT_LEN = 32768

Leaf = tuple[np.ndarray, np.ndarray]  # tokens and pages of a prompt


def main() -> None:
    """Print one table per operation; times are medians in microseconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=200, help="measurements of each figure")
    repeat = parser.parse_args().repeat
    match_and_insert(repeat)
    evict(repeat)
    lock(repeat)
    allocate(repeat)


def match_and_insert(repeat: int) -> None:
    """A long prompt that came in one piece, or chunk by chunk as one node each."""
    tokens = np.random.default_rng(0).integers(0, 150_000, PROMPT_LEN).astype(np.int32)
    print(f"{PROMPT_LEN} cached tokens    page size   nodes   match us   insert known us")
    for page_size in (1, 16, 64):
        pages = np.arange(PROMPT_LEN // page_size, dtype=np.int32)
        for chunk in (PROMPT_LEN, 2048, 512, 64):
            cache = RadixCache(CacheConfig(page_size))
            for end in range(chunk, PROMPT_LEN + 1, chunk):
                cache.insert_prefix(tokens[:end], pages[: end // page_size])
            match_us = median_us(partial(cache.match_prefix, tokens), repeat)
            insert_us = median_us(partial(cache.insert_prefix, tokens, pages), repeat)
            nodes = PROMPT_LEN // chunk
            print(f"{page_size:30d} {nodes:7d} {match_us:10.1f} {insert_us:17.1f}")


def evict(repeat: int) -> None:
    """Evict while ever more nodes are in the tree, a third of them used again or locked."""
    print("\nevict, page size 16        nodes   1 page us   64 pages us   insert new us")
    for num_nodes in (1_000, 10_000, 100_000):
        cache = grown_tree(num_nodes)
        one_us = median_us(partial(cache.evict, 1), repeat)
        many_us = median_us(partial(cache.evict, 64), min(repeat, num_nodes // 400))
        fresh = (leaf_of(uid) for uid in range(1 << 20, 1 << 21))
        insert_us = median_us(partial(insert_next, cache, fresh), repeat)
        print(f"{num_nodes:32d} {one_us:11.1f} {many_us:13.1f} {insert_us:15.1f}")


def grown_tree(num_nodes: int) -> RadixCache:
    """Make a tree of one-page leaves behind shared heads."""
    cache = RadixCache(CacheConfig(page_size=16))
    for uid in range(num_nodes):
        cache.insert_prefix(*leaf_of(uid))
    for uid in range(0, num_nodes, 3):
        handle = cache.match_prefix(leaf_of(uid)[0]).handle
        if uid % 2:
            cache.lock(handle)
    return cache


def insert_next(cache: RadixCache, leaves: Iterator[Leaf]) -> None:
    """Insert one more prompt."""
    cache.insert_prefix(*next(leaves))


def leaf_of(uid: int) -> Leaf:
    """Make tokens and pages of one prompt: a head that 50 share, and a page of its own."""
    tokens = np.full(32, uid, dtype=np.int32)
    tokens[:16] = uid // 50
    return tokens, np.array([2 * uid, 2 * uid + 1], dtype=np.int32)


def lock(repeat: int) -> None:
    """Lock and unlock at the end of a path, alone or beside another lock."""
    print("\nlock and unlock            depth    alone us   shared us")
    for depth in (1, 16, 256):
        cache = RadixCache(CacheConfig(page_size=1))
        tokens = np.arange(depth, dtype=np.int32)
        for end in range(1, depth + 1):
            cache.insert_prefix(tokens[:end], tokens[:end])
        handle, other = (cache.match_prefix(tokens).handle for _ in range(2))

        both = partial(lock_and_unlock, cache, handle)
        alone_us = median_us(both, repeat)
        cache.lock(other)
        print(f"{depth:32d} {alone_us:11.1f} {median_us(both, repeat):11.1f}")


def lock_and_unlock(cache: RadixCache, handle: CacheHandle) -> None:
    """Take a lock and give it back."""
    cache.lock(handle)
    cache.unlock(handle)


def allocate(repeat: int) -> None:
    """Take pages out of a big pool and put them back."""
    print("\nallocate and free          pages   allocate us   free us")
    for num_pages in (1, 16, 256):
        allocator = PageAllocator(200_000)
        taken: list[np.ndarray] = []
        take_us = median_us(partial(take, allocator, num_pages, taken), repeat)
        free_us = median_us(partial(give_back, allocator, taken), repeat)
        print(f"{num_pages:32d} {take_us:13.1f} {free_us:9.1f}")


def take(allocator: PageAllocator, num_pages: int, taken: list[np.ndarray]) -> None:
    """Allocate and remember."""
    taken.append(allocator.allocate(num_pages))


def give_back(allocator: PageAllocator, taken: list[np.ndarray]) -> None:
    """Free what was taken last."""
    allocator.free(taken.pop())


def median_us(action: Callable[[], object], repeat: int) -> float:
    """Return the median time of one call, in microseconds."""
    times = []
    for _ in range(max(repeat, 1)):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


if __name__ == "__main__":
    main()
