"""Keeps the schedulers of a tensor-parallel group together, and notices when they are not."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from minisgl.core import Batch
from minisgl.distributed.contract import Communicator
from minisgl.engine.contract import ForwardOutput, StepEngine, StepResult
from minisgl.message.codec import Codec
from minisgl.scheduler.io import BroadcastIO, SchedulerIO

_DIGEST_BYTES = 16


class TracedEngine(StepEngine):
    """An engine with a digest of what ranks must agree on: each step's batch and its tokens."""

    def __init__(self, engine: StepEngine, comm: Communicator) -> None:
        """Start before the first step."""
        self.limits = engine.limits
        self.backends = engine.backends
        self.picked = engine.picked
        self._engine = engine
        self._comm = comm
        self._hash = hashlib.blake2b(digest_size=_DIGEST_BYTES)

    def forward_batch(self, batch: Batch) -> ForwardOutput:
        """Note what the batch is made of, and launch it.

        Raises:
            CommError: Another rank is gone.
        """
        self._comm.raise_if_broken()
        host = batch.host
        assert host is not None, "the scheduler sets batch.host"
        # With the lengths in front, no two batches give the same bytes.
        head = np.array([batch.is_decode, len(host.table_idx), len(host.page_ids)], np.int32)
        arrays = (host.table_idx, host.cached_lens, host.seq_lens)
        pages = (host.page_rows, host.page_cols, host.page_ids)
        self._hash.update(np.concatenate((head, *arrays, *pages)).tobytes())
        return _TracedOutput(self._engine.forward_batch(batch), self)

    def note(self, tokens: np.ndarray) -> None:
        """Note what was sampled, if it can be believed.

        Raises:
            CommError: Another rank is gone.
        """
        self._comm.raise_if_broken()
        self._hash.update(tokens.tobytes())

    def digest(self) -> bytes:
        """Return the digest of everything so far."""
        return self._hash.digest()


class _TracedOutput(ForwardOutput):
    """A launched step whose tokens are noted when they come."""

    def __init__(self, output: ForwardOutput, engine: TracedEngine) -> None:
        self._output = output
        self._engine = engine

    def wait(self) -> StepResult:
        """Wait for the result; see `ForwardOutput.wait`."""
        result = self._output.wait()
        self._engine.note(result.token_ids)
        return result


def in_lockstep(
    engine: StepEngine,
    comm: Communicator,
    line: SchedulerIO | None,
    codec: Codec[Any],  # Any: knows the messages to a scheduler, and maybe more
) -> tuple[StepEngine, SchedulerIO]:
    """Return what a scheduler of one rank takes for its engine and its line.

    Args:
        engine: Of this rank.
        comm: The group.
        line: To the world on rank 0, ``None`` on the others.
        codec: For the messages.
    """
    traced = TracedEngine(engine, comm)
    return traced, BroadcastIO(comm, line, codec.encode, codec.decode, traced.digest)
