"""The three queues of S3-FIFO over the leaves of a tree of prefixes.

Source: Juncheng Yang, Yazhuo Zhang, Ziyue Qiu, Yao Yue, K. V. Rashmi: "FIFO queues are all you need
for cache eviction", SOSP 2023, doi:10.1145/3600006.3613147, algorithm 1.

A prefix must not go before what continues it, so only unlocked leaves wait in the queues. A page
whose last continuation goes becomes a leaf and takes the head of its queue: it is older than what
was behind it, so that is its place in a first-in-first-out order.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice

from minisgl_cache_s3fifo.page_node import PageNode

Queue = OrderedDict[PageNode, None]


class EvictionQueues:
    """Decides which leaf goes next.

    *Small* holds pages on probation, *main* those that proved useful, and *ghost* the hashes of
    pages that left small unused: who comes back from there goes to main at once.
    """

    def __init__(self, small_share: float) -> None:
        """Start empty; see `S3FifoSettings.small_share`."""
        self._small_share = small_share
        self._small: Queue = OrderedDict()
        self._main: Queue = OrderedDict()
        self._ghost: dict[bytes, None] = {}
        self._num_on_probation = 0

    def admit(self, node: PageNode) -> None:
        """Take in a new page, which is not a leaf in any queue yet."""
        node.is_main = node.digest in self._ghost
        self._ghost.pop(node.digest, None)
        self._num_on_probation += not node.is_main

    def append(self, node: PageNode) -> None:
        """Let a leaf wait behind all others."""
        self._queue_of(node)[node] = None

    def put_first(self, node: PageNode) -> None:
        """Let a page that has become a leaf wait in front."""
        queue = self._queue_of(node)
        queue[node] = None
        queue.move_to_end(node, last=False)

    def remove(self, node: PageNode) -> None:
        """Take out a leaf that has been locked or continued; others are left alone."""
        self._queue_of(node).pop(node, None)

    def pop(self, num_pages: int) -> PageNode:
        """Take out the leaf that is given up next; there is one.

        Args:
            num_pages: Pages that the cache owns, on which the share of small depends.
        """
        while True:
            wants_small = self._num_on_probation > self._small_share * num_pages
            if self._small and (wants_small or not self._main):
                node, _ = self._small.popitem(last=False)
                if node.num_uses <= 1:
                    self._num_on_probation -= 1
                    self._ghost[node.digest] = None
                    return node
                self._promote(node)
            else:
                node, _ = self._main.popitem(last=False)
                if node.num_uses == 0:
                    return node
                node.num_uses -= 1
                self._main[node] = None

    def forget_ghosts(self, num_pages: int) -> None:
        """Keep about as many ghosts, the newest, as the cache has pages."""
        num_excess = len(self._ghost) - num_pages
        if num_excess > num_pages:
            # A copy, because a dictionary keeps the room of what was deleted.
            self._ghost = dict.fromkeys(islice(self._ghost, num_excess, None))

    def waiting(self) -> set[PageNode]:
        """Return all leaves that wait."""
        return {*self._small, *self._main}

    @property
    def num_on_probation(self) -> int:
        """Pages that have not left probation, leaves or not."""
        return self._num_on_probation

    def _promote(self, node: PageNode) -> None:
        """Move a page that was used again from small to main."""
        node.is_main, node.num_uses = True, 0
        self._num_on_probation -= 1
        self._main[node] = None

    def _queue_of(self, node: PageNode) -> Queue:
        return self._main if node.is_main else self._small
