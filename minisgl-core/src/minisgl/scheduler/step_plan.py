"""From decisions to the arrays of one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from minisgl.core import Batch, Req, StepArrays
from minisgl.plugin.spec import Phase
from minisgl.scheduler.admission import Chunk
from minisgl.scheduler.cache_manager import CacheManager
from minisgl.scheduler.contract import ScheduledReq
from minisgl.scheduler.decode import DecodeManager


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step that can be launched; nothing in the books of its requests says so yet.

    Attributes:
        reqs: Its requests in row order; a list of its own.
        phase: Of all of them.
        is_sampled: Prefill only, whether each samples.
        arrays: For the engine.
    """

    reqs: list[ScheduledReq]
    phase: Phase
    is_sampled: list[bool]
    arrays: StepArrays

    @property
    def sampled(self) -> list[ScheduledReq]:
        """The requests that get a token, in the order of the step's result."""
        if self.phase == "decode":
            return self.reqs
        return [
            req for req, is_sampled in zip(self.reqs, self.is_sampled, strict=True) if is_sampled
        ]

    def batch(self) -> Batch:
        """Make a batch for the engine."""
        return Batch(cast("list[Req]", self.reqs), self.phase, self.is_sampled, self.arrays)

    def only(self, index: int) -> StepPlan:
        """Return the same step for one of its requests, with the page updates of all."""
        part, arrays = slice(index, index + 1), self.arrays
        return StepPlan(
            reqs=self.reqs[part],
            phase=self.phase,
            is_sampled=self.is_sampled[part],
            arrays=StepArrays(
                arrays.table_idx[part],
                arrays.cached_lens[part],
                arrays.seq_lens[part],
                arrays.page_rows,
                arrays.page_cols,
                arrays.page_ids,
                arrays.page_table,
            ),
        )


def plan_prefill(chunks: list[Chunk], cache: CacheManager) -> StepPlan:
    """Make a step of chunks; the engine reads the tokens ``cached_len … device_len``."""
    for chunk in chunks:
        chunk.req.device_len = chunk.req.cached_len + chunk.num_tokens
    reqs = [chunk.req for chunk in chunks]
    rows = np.array([req.table_idx for req in reqs], dtype=np.int32)
    cached_lens = np.array([req.cached_len for req in reqs], dtype=np.int32)
    seq_lens = np.array([req.device_len for req in reqs], dtype=np.int32)
    arrays = StepArrays(rows, cached_lens, seq_lens, *cache.take_updates(), cache.page_table)
    return StepPlan(reqs, "prefill", [chunk.is_last for chunk in chunks], arrays)


def plan_decode(decode: DecodeManager, cache: CacheManager) -> StepPlan:
    """Make a step of every running request, all of which have a page for their token."""
    reqs, lens = list(decode.reqs), decode.lens
    arrays = StepArrays(decode.rows, lens, lens + 1, *cache.take_updates(), cache.page_table)
    return StepPlan(reqs, "decode", [], arrays)
