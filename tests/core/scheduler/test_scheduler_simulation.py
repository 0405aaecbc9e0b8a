from __future__ import annotations

from itertools import product
from random import Random

import pytest

from minisgl.scheduler.config import SchedulerConfig
from tests.core.scheduler.simulation import Traffic, simulate

CACHES = ("radix", "naive")
PAGE_SIZES = (1, 4, 16, 64)


def random_config(rng: Random, is_overlap: bool) -> SchedulerConfig:
    is_reserving = rng.random() < 0.15
    return SchedulerConfig(
        max_prefill_length=rng.choice([1, 3, 7, 16, 33, 64, 1000]),
        max_prefill_steps=rng.choice([1, 2, 4, 100]),
        admission="reserve" if is_reserving else "optimistic",
        is_overlap=is_overlap,
        max_overtakes=rng.choice([0, 2, 64]),
        min_shared_tokens=rng.choice([1, 4, 16]),
        headroom_tokens=rng.choice([0, 0, 0, 2, 64]),
        is_isolating=False,  # so that what the fake engine finds wrong is not taken in stride
        is_checked_every_step=True,
    )


def random_traffic(
    seed: int, num_requests: int, cache: str, is_overlap: bool, page_size: int
) -> Traffic:
    rng = Random(seed)
    return Traffic(
        seed=seed,
        num_requests=num_requests,
        cache=cache,
        policy=rng.choice(["fcfs", "fcfs", "lpm", "priority"]),
        page_size=page_size,
        pool_tokens=rng.choice([72, 100, 160, 256, 2000]),
        config=random_config(rng, is_overlap),
    )


@pytest.mark.parametrize(
    ("cache", "is_overlap", "page_size"), list(product(CACHES, (True, False), PAGE_SIZES))
)
def test_random_traffic_gets_the_tokens_of_its_history(
    cache: str, is_overlap: bool, page_size: int
) -> None:
    for part in range(4):
        seed = 100 * part + 10 * page_size + 2 * is_overlap + (cache == "radix")
        simulate(random_traffic(seed, 50, cache, is_overlap, page_size))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("cache", "is_overlap"), list(product(CACHES, (True, False))))
def test_a_hundred_thousand_requests_get_the_tokens_of_their_history(
    cache: str, is_overlap: bool
) -> None:
    for part in range(50):
        page_size = PAGE_SIZES[part % 4]
        simulate(random_traffic(7000 + part, 500, cache, is_overlap, page_size))
