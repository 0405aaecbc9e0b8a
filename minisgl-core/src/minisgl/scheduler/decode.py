"""The running requests, each about to compute one token per step."""

from __future__ import annotations

import numpy as np

from minisgl.scheduler.contract import ScheduledReq


class DecodeManager:
    """The requests that decode, with their lengths as arrays.

    The arrays advance with every step and are made anew only after a request came or went, so a
    steady step costs a few array operations beside the books of the requests themselves.
    """

    def __init__(self) -> None:
        """Start without requests."""
        self._reqs: list[ScheduledReq] = []
        self._is_stale = False
        empty = np.empty(0, dtype=np.int32)
        self._rows: np.ndarray = empty
        self._lens: np.ndarray = empty
        self._last_lens: np.ndarray = empty

    @property
    def reqs(self) -> list[ScheduledReq]:
        """The requests that the next step could compute, in the order in which they came."""
        if self._is_stale:
            self._reqs = [
                req
                for req in self._reqs
                if not req.is_finished and req.device_len < req.max_device_len
            ]
            self._set_arrays()
            self._is_stale = False
        return self._reqs

    @property
    def rows(self) -> np.ndarray:
        """Rows of `reqs` as last read, ``[num_reqs]`` int32; never written to."""
        return self._rows

    @property
    def lens(self) -> np.ndarray:
        """Tokens with KV of `reqs` as last read, ``[num_reqs]`` int32; never written to."""
        return self._lens

    def add(self, req: ScheduledReq) -> None:
        """Let ``req`` decode from the next step on."""
        self._reqs.append(req)
        self._is_stale = True

    def remove(self, req: ScheduledReq) -> None:
        """Take out a request that goes back to the queue."""
        self._reqs = [other for other in self._reqs if other is not req]
        self._is_stale = True

    def refresh(self) -> None:
        """Look for finished requests before `reqs` is used again."""
        self._is_stale = True

    def advance(self, reqs: list[ScheduledReq], step: int) -> None:
        """Account for the launched step ``step``, which computes one token of each request.

        Requests that get their last token in it leave.

        Args:
            reqs: All of `reqs`, or some of them where others could not be launched.
            step: Number of the step.
        """
        for req in reqs:
            req.cached_len = req.device_len
            req.device_len += 1
            req.last_step = step
        if self._is_stale or len(reqs) < len(self._reqs):
            self._is_stale = True
            return
        self._lens = self._lens + 1
        if (self._lens >= self._last_lens).any():
            self._is_stale = True

    def growth(self, num_tokens: int, page_size: int) -> int:
        """Return how many pages are missing until each request has ``num_tokens`` more tokens.

        Requests that will end before that count as far as they go.
        """
        if not self.reqs:
            return 0
        grown = np.minimum(self._lens + num_tokens, self._last_lens)
        pages = (grown + (page_size - 1)) // page_size - (self._lens + (page_size - 1)) // page_size
        return int(pages.sum())

    def _set_arrays(self) -> None:
        """Make the arrays anew from the requests."""
        reqs = self._reqs
        self._rows = np.array([req.table_idx for req in reqs], dtype=np.int32)
        self._lens = np.array([req.cached_len for req in reqs], dtype=np.int32)
        # The last sampled token needs no KV.
        self._last_lens = np.array([req.max_device_len - 1 for req in reqs], dtype=np.int32)
