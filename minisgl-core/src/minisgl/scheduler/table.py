"""Who holds which row of the page table and of the token pool."""

from __future__ import annotations

from minisgl.errors import IntegrityError
from minisgl.scheduler.contract import ScheduledReq


class TableManager:
    """Gives rows to requests and takes them back."""

    def __init__(self, num_rows: int) -> None:
        """Make every row free.

        Args:
            num_rows: Rows, numbered from 0.
        """
        self._free = list(range(num_rows - 1, -1, -1))
        self._owners: dict[int, ScheduledReq] = {}
        self.num_rows = num_rows

    @property
    def num_free(self) -> int:
        """Rows that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Rows that requests hold."""
        return len(self._owners)

    @property
    def owners(self) -> list[ScheduledReq]:
        """The requests that hold a row, in the order in which they got it; a copy."""
        return list(self._owners.values())

    def take(self, req: ScheduledReq) -> None:
        """Give ``req`` a row as its ``table_idx``; there must be a free one."""
        req.table_idx = self._free.pop()
        self._owners[req.table_idx] = req

    def give_back(self, req: ScheduledReq) -> None:
        """Take the row of ``req`` back.

        Raises:
            IntegrityError: ``req`` does not hold that row.
        """
        if self._owners.get(req.table_idx) is not req:
            raise IntegrityError(
                f"give back row {req.table_idx}: request {req.uid} does not own it"
            )
        del self._owners[req.table_idx]
        self._free.append(req.table_idx)
        req.table_idx = -1

    def check_integrity(self) -> None:
        """Compare rows with their owners.

        Raises:
            IntegrityError: A row is neither free nor held, or both.
        """
        rows = sorted([*self._free, *self._owners])
        if rows != list(range(self.num_rows)):
            raise IntegrityError(f"rows {rows}: must be each of 0 to {self.num_rows - 1} once")
        for row, req in self._owners.items():
            if req.table_idx != row:
                raise IntegrityError(
                    f"row {row}: its request {req.uid} believes in {req.table_idx}"
                )
