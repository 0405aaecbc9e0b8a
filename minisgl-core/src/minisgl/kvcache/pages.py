"""The free list of the KV pool: which pages nobody owns."""

from __future__ import annotations

import numpy as np

from minisgl.errors import CapacityError, IntegrityError


class PageAllocator:
    """Hands out pages of the pool and takes them back; host only and single-threaded.

    The free pages are a stack in one int32 array, so that the cost of a call does not depend on
    the size of the pool, and barely on the number of pages asked for. Pages that were freed last
    are handed out first; a fresh pool is handed out in ascending order.
    """

    def __init__(self, num_pages: int) -> None:
        """Make every page free.

        Args:
            num_pages: Pages of the pool, numbered from 0; at least 0.
        """
        self._num_pages = num_pages
        self._num_free = num_pages
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._is_free = np.ones(num_pages, dtype=np.bool_)
        # Scratch for finding a page that is freed twice in one call: see `_refuse_repeats`.
        self._order = np.arange(num_pages, dtype=np.int32)
        self._mark = np.zeros(num_pages, dtype=np.int32)

    @property
    def num_pages(self) -> int:
        """Pages of the pool, free or not."""
        return self._num_pages

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return self._num_free

    def allocate(self, num_pages: int) -> np.ndarray:
        """Give pages to the caller.

        Args:
            num_pages: How many, at least 0.

        Returns:
            ``[num_pages]`` int32, distinct; the caller's own array.

        Raises:
            CapacityError: Fewer are free. Nothing was changed.
        """
        if num_pages > self._num_free:
            raise CapacityError(f"allocate {num_pages} pages: only {self._num_free} are free")
        assert num_pages >= 0, f"allocate {num_pages} pages: must be at least 0"
        rest = self._num_free - num_pages
        pages = self._stack[rest : self._num_free][::-1].copy()
        self._is_free[pages.astype(np.intp)] = False  # other index types are several times slower
        self._num_free = rest
        return pages

    def free(self, pages: np.ndarray) -> None:
        """Take pages back.

        Args:
            pages: ``[n]`` int32, distinct, each owned by the caller; not kept.

        Raises:
            IntegrityError: A page is free already, is given twice, or does not exist. Nothing was
                changed.
        """
        num_freed = len(pages)
        if num_freed == 0:
            return
        # As unsigned numbers, negative pages are out of range too instead of counting from the end.
        index = np.asarray(pages, dtype=np.int32).view(np.uint32).astype(np.intp)
        try:
            is_free = self._is_free[index]
        except IndexError:
            raise IntegrityError(
                f"free pages {_few(pages)}: pages are 0 to {self._num_pages - 1}"
            ) from None
        if np.count_nonzero(is_free):
            raise IntegrityError(f"free pages {_few(pages[is_free])}: they are free already")
        if num_freed > 1:
            self._refuse_repeats(pages, index)
        top = self._num_free + num_freed
        self._stack[self._num_free : top] = pages[::-1]
        self._is_free[index] = True
        self._num_free = top

    def free_pages(self) -> np.ndarray:
        """Return the pages that nobody owns, ``[num_free]`` int32; a copy."""
        return self._stack[: self._num_free].copy()

    def check_integrity(self) -> None:
        """Compare the stack with the marks.

        Raises:
            IntegrityError: They disagree; the message says where.
        """
        marked = np.flatnonzero(self._is_free)
        stacked = np.sort(self._stack[: self._num_free])
        if not np.array_equal(marked, stacked):
            wrong = np.setxor1d(marked, stacked)
            raise IntegrityError(f"free list: pages {_few(wrong)} are marked and listed unlike")

    def _refuse_repeats(self, pages: np.ndarray, index: np.ndarray) -> None:
        """Refuse a page that is given twice: the later write to its mark hides the earlier one."""
        order = self._order[: len(pages)]
        is_repeated = len(order) < len(pages)
        if not is_repeated:
            self._mark[index] = order
            is_repeated = self._mark[index].tobytes() != order.tobytes()
        if is_repeated:
            values, counts = np.unique(pages, return_counts=True)
            raise IntegrityError(f"free pages {_few(values[counts > 1])}: given more than once")


def _few(pages: np.ndarray) -> str:
    """Name some pages in a message."""
    shown = ", ".join(str(page) for page in pages[:8])
    return shown if len(pages) <= 8 else f"{shown}, … ({len(pages)} in all)"
