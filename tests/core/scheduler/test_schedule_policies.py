"""Who starts first, and who goes back first."""

from __future__ import annotations

from minisgl.testing.fake_engine import make_limits
from tests.core.scheduler.harness import Harness, make_config


def first_steps(harness: Harness, uids: list[int]) -> list[int]:
    """Order requests by their first token."""
    return sorted(uids, key=lambda uid: harness.outcomes[uid].token_steps[0])


def make_harness(policy: str) -> Harness:
    # A row and a half: one request at a time makes the order visible.
    return Harness(make_limits(max_running_reqs=1), make_config(), policy=policy)


def test_fcfs_starts_in_order_of_arrival() -> None:
    harness = make_harness("fcfs")
    uids = [harness.submit([n] * 9, max_tokens=2, priority=n) for n in range(5)]
    harness.run()
    assert first_steps(harness, uids) == uids


def test_priority_starts_the_most_urgent_first_and_equals_in_order() -> None:
    harness = make_harness("priority")
    urgencies = [0, 2, 1, 2, 0]
    uids = [
        harness.submit([n] * 9, max_tokens=2, priority=urgency)
        for n, urgency in enumerate(urgencies)
    ]
    harness.run()
    assert first_steps(harness, uids) == [uids[1], uids[3], uids[2], uids[0], uids[4]]


def test_lpm_starts_the_longest_cached_prefix_first() -> None:
    harness = make_harness("lpm")
    known = list(range(40))
    harness.submit(known, max_tokens=1)
    harness.run()
    uids = [harness.submit([*known[:n], 90], max_tokens=1) for n in (0, 16, 32, 8)]
    harness.run()
    assert first_steps(harness, uids) == [uids[2], uids[1], uids[3], uids[0]]


def test_priority_retracts_the_least_urgent_first() -> None:
    limits = make_limits(num_pages=60, page_size=1, max_running_reqs=4)
    harness = Harness(limits, make_config(headroom_tokens=0), "naive", "priority")
    idle = harness.submit([1] * 5, max_tokens=40, ignore_eos=True, priority=0)
    urgent = harness.submit([2] * 5, max_tokens=40, ignore_eos=True, priority=1)
    harness.run()
    harness.check_all()
    assert harness.scheduler.stats().num_retractions >= 1
    assert harness.outcomes[urgent].token_steps[-1] < harness.outcomes[idle].token_steps[-1]
