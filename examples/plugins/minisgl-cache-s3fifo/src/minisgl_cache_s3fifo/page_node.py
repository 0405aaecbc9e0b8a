"""A known page: a node of the tree of prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b


class PageNode:
    """One page behind another one; the cache changes it.

    Attributes:
        tokens: Bytes of its int32 tokens; empty in the root.
        page: The page, -1 in the root.
        parent: ``None`` in the root and in a node that was evicted.
        children: By their tokens.
        digest: Hash of all tokens up to its end, by which the ghosts know it; the same in every
            process, because the caches of all ranks have to decide alike.
        num_locks: Handles locked at this node, and children that have locks.
        num_uses: How often it was used since it was last looked at for eviction, 3 at most.
        is_main: Whether it has left probation.
    """

    __slots__ = (
        "children",
        "digest",
        "is_main",
        "num_locks",
        "num_uses",
        "page",
        "parent",
        "tokens",
    )

    MAX_USES = 3

    def __init__(self, tokens: bytes, page: int, parent: PageNode | None) -> None:
        """Make a node that its parent does not know yet."""
        self.tokens = tokens
        self.page = page
        self.parent = parent
        self.children: dict[bytes, PageNode] = {}
        before: bytes = b"" if parent is None else parent.digest
        self.digest: bytes = blake2b(before + tokens, digest_size=16).digest()
        self.num_locks = 0
        self.num_uses = 0
        self.is_main = False

    @property
    def is_root(self) -> bool:
        """Whether it stands for the empty prefix."""
        return not self.tokens

    def use(self) -> None:
        """Count one use."""
        self.num_uses = min(self.num_uses + 1, self.MAX_USES)

    def upwards(self) -> Iterator[PageNode]:
        """Yield the node and those above it, the root left out."""
        node = self
        while not node.is_root and node.parent is not None:
            yield node
            node = node.parent
