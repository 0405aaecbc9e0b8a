"""The walk behind the radix cache's self-check: nothing is believed, everything is counted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from minisgl.errors import IntegrityError
from minisgl.kvcache.radix_node import RadixNode


class TreeCount(NamedTuple):
    """What a tree really holds.

    Attributes:
        pages: ``[num_pages]`` int32, every page of every node.
        num_evictable: Pages of unlocked nodes.
        num_protected: Pages of locked nodes.
        num_handle_locks: Locks that are not a locked child's.
    """

    pages: np.ndarray
    num_evictable: int
    num_protected: int
    num_handle_locks: int


def check_tree(
    root: RadixNode, eviction_order: Iterable[RadixNode], page_size: int, page_bytes: int
) -> TreeCount:
    """Walk a tree and its order of eviction.

    Args:
        root: The root.
        eviction_order: The unlocked nodes, the first to be evicted first.
        page_size: Tokens of a page.
        page_bytes: Bytes of a page's tokens.

    Returns:
        What was counted.

    Raises:
        IntegrityError: A node, a lock, a page or the order is wrong.
    """
    rank = {node: position for position, node in enumerate(eviction_order)}
    pages: list[np.ndarray] = []
    num_evictable = num_protected = num_handle_locks = 0
    num_unlocked = 0
    stack = [root]
    while stack:
        node = stack.pop()
        if node is not root:
            _check_node(node, page_size, page_bytes)
            _check_rank(node, rank)
            num_unlocked += node.num_locks == 0
        if node.num_locks > 0:
            num_protected += len(node.pages)
        else:
            num_evictable += len(node.pages)
        pages.append(node.pages)
        num_handle_locks += _handle_locks(node)
        for first_page, child in node.children.items():
            if child.parent is not node or child.key[:page_bytes] != first_page:
                raise IntegrityError(f"{_name(child)}: is not linked to the node that holds it")
            stack.append(child)
    if num_unlocked != len(rank):
        raise IntegrityError(
            f"radix cache: {len(rank)} nodes wait for eviction, the tree has {num_unlocked} "
            "unlocked ones"
        )
    return TreeCount(_checked_pages(pages), num_evictable, num_protected, num_handle_locks)


def _check_node(node: RadixNode, page_size: int, page_bytes: int) -> None:
    """Compare the sizes of a node's parts."""
    num_pages = len(node.pages)
    if num_pages == 0 or len(node.key) != num_pages * page_bytes:
        raise IntegrityError(
            f"{_name(node)}: has {num_pages} pages of {page_bytes} bytes and a key of "
            f"{len(node.key)} bytes"
        )
    if node.pages.base is not None or node.pages.dtype != np.int32:
        raise IntegrityError(f"{_name(node)}: does not own its page array, or it is not int32")
    assert node.parent is not None, "only the root has no parent"
    if node.end != node.parent.end + num_pages * page_size:
        raise IntegrityError(f"{_name(node)}: its parent ends at {node.parent.end}")


def _check_rank(node: RadixNode, rank: dict[RadixNode, int]) -> None:
    """See that locked nodes are not up for eviction, and others before their parents."""
    if (node.num_locks > 0) == (node in rank):
        state = "locked and up for" if node.num_locks > 0 else "unlocked and missing from"
        raise IntegrityError(f"{_name(node)}: is {state} eviction")
    parent = node.parent
    if node in rank and parent in rank and rank[node] > rank[parent]:
        raise IntegrityError(f"{_name(node)}: would be evicted after its parent")


def _handle_locks(node: RadixNode) -> int:
    """Count the locks that handles hold at this very node."""
    num_children = sum(child.num_locks > 0 for child in node.children.values())
    if node.num_locks < num_children:
        raise IntegrityError(
            f"{_name(node)}: has {node.num_locks} locks and {num_children} locked children"
        )
    return node.num_locks - num_children


def _checked_pages(arrays: list[np.ndarray]) -> np.ndarray:
    """Join the pages of all nodes; refuse one that is in two places."""
    pages = np.concatenate(arrays)
    values, counts = np.unique(pages, return_counts=True)
    if len(values) != len(pages):
        raise IntegrityError(f"radix cache: page {values[counts > 1][0]} is in two places")
    if len(values) and values[0] < 0:
        raise IntegrityError(f"radix cache: page {values[0]} is negative")
    return pages


def _name(node: RadixNode) -> str:
    """Name a node in a message by where it is."""
    return f"radix node of {len(node.pages)} pages that ends at token {node.end}"
