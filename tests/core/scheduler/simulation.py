"""Random traffic through the real scheduler, with every token compared."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from minisgl.message.types import FlushMsg
from minisgl.scheduler.config import SchedulerConfig
from minisgl.testing.fake_engine import make_limits
from tests.core.scheduler.harness import Harness

MAX_SEQ_LEN = 72
VOCAB_SIZE = 61


@dataclass(frozen=True)
class Traffic:
    """What is simulated; everything else is drawn from the seed."""

    seed: int
    num_requests: int
    cache: str = "radix"
    policy: str = "fcfs"
    page_size: int = 4
    pool_tokens: int = 256
    config: SchedulerConfig = SchedulerConfig(is_checked_every_step=True)


def simulate(traffic: Traffic) -> Harness:
    """Run the traffic to its end; raises when any request, page or row goes astray."""
    rng = Random(traffic.seed)
    limits = make_limits(
        num_pages=max(2, traffic.pool_tokens // traffic.page_size),
        page_size=traffic.page_size,
        max_running_reqs=rng.choice([1, 4, 16, 32]),
        max_seq_len=MAX_SEQ_LEN,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset([5, 7]),
    )
    harness = Harness(limits, traffic.config, traffic.cache, traffic.policy)
    stems = [random_tokens(rng, rng.randrange(10, 50)) for _ in range(4)]
    rate = rng.uniform(0.2, 4.0)
    while len(harness.sent) < traffic.num_requests:
        while rng.random() < rate / (1 + rate) and len(harness.sent) < traffic.num_requests:
            submit_random(harness, rng, stems)
        if rng.random() < 0.08:
            # Waiting, running, finished or unknown: whatever that number is.
            harness.abort(rng.randrange(max(0, len(harness.sent) - 12), len(harness.sent) + 2))
        if rng.random() < 0.01:
            harness.io.put([FlushMsg()])
        harness.step()
        if harness.scheduler.stats().num_waiting > 40:
            rate = 0.05
    harness.run()
    harness.check_all()
    stats = harness.scheduler.stats()
    assert stats.num_running == stats.num_waiting == 0
    assert sum(stats.num_finished.values()) == len(harness.sent)
    assert stats.num_free_pages + stats.num_evictable_pages == stats.num_pages
    return harness


def submit_random(harness: Harness, rng: Random, stems: list[list[int]]) -> None:
    """Send a request, now and then its twins too, or one that cannot run."""
    page_size = harness.engine.limits.page_size
    stem = rng.choice(stems)
    shared = stem[: rng.randrange(len(stem) + 1)]
    prompt = shared + random_tokens(rng, rng.randrange(0 if shared else 1, 12))
    if rng.random() < 0.2:  # lengths around whole pages
        length = rng.randrange(1, 4) * page_size + rng.randrange(-1, 2)
        prompt = (stem + prompt)[: max(1, length)]
    if rng.random() < 0.02:
        prompt = rng.choice([[], [VOCAB_SIZE], [-1], [1] * MAX_SEQ_LEN, [1] * 500])
    max_tokens = (
        None
        if rng.random() < 0.02
        else rng.choice([1, 2, rng.randrange(1, 30), rng.randrange(20, 60)])
    )
    num_twins = rng.choice([1] * 6 + [3])
    for _ in range(num_twins):
        harness.submit(
            prompt,
            max_tokens=max_tokens,
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=(11,) if rng.random() < 0.2 else (),
            priority=rng.randrange(3),
        )


def random_tokens(rng: Random, num_tokens: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)]
