"""All ranks get the same messages at the same step, and so do the same."""

from __future__ import annotations

import pickle
from collections import deque

import numpy as np
import torch

from minisgl.core import Batch
from minisgl.distributed.contract import Communicator
from minisgl.message.types import AbortMsg, SchedulerMsg, UserMsg
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.io import BroadcastIO, OfflineIO
from minisgl.scheduler.scheduler import Scheduler
from minisgl.testing.fake_engine import FakeEngine, make_limits
from tests.core.scheduler.harness import make_cache, make_config, make_policy


class WireComm(Communicator):
    """One rank of a group within a process: what rank 0 sends waits until the other asks."""

    def __init__(self, rank: int, wire: deque[bytes]) -> None:
        self.rank, self.size, self._wire = rank, 2, wire

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        if payload is None:
            return self._wire.popleft()
        self._wire.append(payload)
        return payload

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def min_int(self, value: int) -> int:
        raise NotImplementedError

    def shutdown(self) -> None:
        raise NotImplementedError


def encode(messages: list[SchedulerMsg]) -> bytes:
    return pickle.dumps(messages)


def decode(payload: bytes) -> list[SchedulerMsg]:
    messages: list[SchedulerMsg] = pickle.loads(payload)
    return messages


def test_ranks_launch_the_same_steps_whenever_messages_come() -> None:
    wire: deque[bytes] = deque()
    line = OfflineIO()
    launches: list[list[object]] = [[], []]
    schedulers = []
    for rank in range(2):
        engine = FakeEngine(make_limits(num_pages=24, eos_token_ids=frozenset([1, 2])))

        def note(batch: Batch, rank: int = rank) -> None:
            assert batch.host is not None
            rows = [(req.uid, req.table_idx, req.extend_len) for req in batch.reqs]
            launches[rank].append((batch.phase, rows, batch.host.page_ids.tolist()))

        engine.on_launch = note
        io = BroadcastIO(WireComm(rank, wire), line if rank == 0 else None, encode, decode)
        cache, policy = make_cache("radix", 4), make_policy("lpm")
        schedulers.append(Scheduler(engine, cache, policy, io, make_config(headroom_tokens=0)))
    rng = np.random.default_rng(3)
    for step in range(700):
        if step < 60:
            prompt = rng.integers(0, 4, size=rng.integers(1, 20), dtype=np.int32)
            line.put([UserMsg(step, prompt, SamplingParams(max_tokens=int(rng.integers(1, 40))))])
        if step % 7 == 0:
            line.put([AbortMsg(step // 2)])
        for scheduler in schedulers:
            scheduler.step()
    assert not schedulers[0].has_work
    assert schedulers[0].stats().num_retractions > 0
    assert launches[0] == launches[1]
    assert schedulers[0].stats() == schedulers[1].stats()
