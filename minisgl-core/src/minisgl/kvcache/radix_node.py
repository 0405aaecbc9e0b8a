"""A node of the radix tree: a run of whole pages."""

from __future__ import annotations

import numpy as np

from minisgl.errors import IntegrityError


class RadixNode:
    """A run of pages that follows its parent's; the cache changes it.

    Attributes:
        key: Bytes of the int32 tokens of the run; whole pages, at least one except in the root.
        pages: ``[len(key) / page bytes]`` int32; the node's own array, never a view.
        parent: ``None`` in the root and in a node that was evicted.
        children: By the bytes of their first page.
        end: Tokens from the root to the end of this run, or -1 once evicted.
        num_locks: Handles locked at this node, and children that have locks.
    """

    __slots__ = ("children", "end", "key", "num_locks", "pages", "parent")

    def __init__(self, key: bytes, pages: np.ndarray, parent: RadixNode | None, end: int) -> None:
        """Make a node without children; the parent does not know it yet."""
        self.key = key
        self.pages = pages
        self.parent = parent
        self.children: dict[bytes, RadixNode] = {}
        self.end = end
        self.num_locks = 0

    def split_head(self, num_head_pages: int, page_bytes: int, page_size: int) -> RadixNode:
        """Move the first pages into a new node between this one and its parent.

        Args:
            num_head_pages: Pages of the new node, at least 1 and fewer than this node has.
            page_bytes: Bytes of a page's tokens.
            page_size: Tokens of a page.

        Returns:
            The new node. It is locked once if this one is locked: by this child.
        """
        parent = self.parent
        if parent is None or not 0 < num_head_pages < len(self.pages):
            raise IntegrityError(
                f"split after {num_head_pages} pages: the node has {len(self.pages)}"
            )
        cut = num_head_pages * page_bytes
        num_tail_tokens = (len(self.pages) - num_head_pages) * page_size
        head = RadixNode(
            self.key[:cut], self.pages[:num_head_pages].copy(), parent, self.end - num_tail_tokens
        )
        parent.children[self.key[:page_bytes]] = head
        self.parent = head
        # Copies, so that neither half keeps the array of the whole alive.
        self.key = self.key[cut:]
        self.pages = self.pages[num_head_pages:].copy()
        head.children[self.key[:page_bytes]] = self
        head.num_locks = 1 if self.num_locks else 0
        return head

    def cut_tail(self, num_tail_pages: int, page_bytes: int, page_size: int) -> np.ndarray:
        """Drop the last pages of a leaf and return them.

        Args:
            num_tail_pages: Fewer than the node has.
            page_bytes: Bytes of a page's tokens.
            page_size: Tokens of a page.

        Returns:
            ``[num_tail_pages]`` int32.
        """
        keep = len(self.pages) - num_tail_pages
        tail = self.pages[keep:].copy()
        self.pages = self.pages[:keep].copy()
        self.key = self.key[: keep * page_bytes]
        self.end -= num_tail_pages * page_size
        return tail


def common_pages(node_key: bytes, key: bytes, start: int, stop: int, page_bytes: int) -> int:
    """Count the leading pages that a node shares with ``key[start:stop]``."""
    num_bytes = min(len(node_key), stop - start)
    ours = np.frombuffer(node_key, dtype=np.int32, count=num_bytes // 4)
    theirs = np.frombuffer(key, dtype=np.int32, count=num_bytes // 4, offset=start)
    is_different = ours != theirs
    first = int(is_different.argmax())
    num_equal = first if is_different[first] else len(ours)
    return num_equal * 4 // page_bytes
