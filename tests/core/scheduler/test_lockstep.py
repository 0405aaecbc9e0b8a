"""What ranks decide is summed up, and a rank that decides otherwise is told so."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from minisgl.errors import IntegrityError
from minisgl.message.types import UserMsg
from minisgl.message.wire import wire_codec
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.io import OfflineIO
from minisgl.scheduler.lockstep import in_lockstep
from minisgl.scheduler.scheduler import Scheduler
from minisgl.testing.fake_engine import FakeEngine, make_limits
from tests.core.scheduler.harness import make_cache, make_config, make_policy
from tests.core.scheduler.test_scheduler_broadcast import WireComm


def two_ranks(
    line: OfflineIO, vocab_sizes: tuple[int, int] = (100, 100), budgets: tuple[int, int] = (16, 16)
) -> list[Scheduler]:
    """Ranks of one process; an engine of another vocabulary samples other tokens."""
    wire: deque[bytes] = deque()
    ranks = []
    for rank, (vocab_size, budget) in enumerate(zip(vocab_sizes, budgets, strict=True)):
        engine = FakeEngine(make_limits(num_pages=24, vocab_size=vocab_size))
        own_line = line if rank == 0 else None
        traced, io = in_lockstep(engine, WireComm(rank, wire), own_line, wire_codec())
        cache, policy = make_cache("radix", 4), make_policy("fcfs")
        config = make_config(max_prefill_length=budget)
        ranks.append(Scheduler(traced, cache, policy, io, config))
    return ranks


def ask(line: OfflineIO, uid: int) -> None:
    line.put([UserMsg(uid, np.array([5, 6, 7], np.int32), SamplingParams(max_tokens=8))])


def test_ranks_that_agree_go_on() -> None:
    line = OfflineIO()
    ranks = two_ranks(line)
    ask(line, 1)
    for _ in range(20):
        for rank in ranks:
            rank.step()
    assert [rank.stats().num_finished["length"] for rank in ranks] == [1, 1]


def test_another_token_is_noticed_before_the_next_batch() -> None:
    line = OfflineIO()
    first, second = two_ranks(line, vocab_sizes=(100, 97))
    ask(line, 1)
    for _ in range(2):  # under overlap the first token is known after two steps
        first.step()
        second.step()
    first.step()
    with pytest.raises(IntegrityError, match="rank 1 has parted from rank 0"):
        second.step()


def test_another_batch_is_noticed_before_the_next_one() -> None:
    line = OfflineIO()
    first, second = two_ranks(line, budgets=(16, 2))
    ask(line, 1)
    first.step()
    second.step()
    first.step()
    with pytest.raises(IntegrityError, match="their batches or sampled tokens differ"):
        second.step()
