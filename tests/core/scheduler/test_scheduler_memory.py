"""Too little memory: retraction, strict admission, and the last page."""

from __future__ import annotations

import pytest

from minisgl.testing.fake_engine import make_limits
from tests.core.scheduler.harness import Harness, make_config


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    return [(5 * i + 17 * seed + i * i * (seed + 1)) % 97 for i in range(num_tokens)]


@pytest.mark.parametrize("cache", ["radix", "naive"])
@pytest.mark.parametrize("is_overlap", [True, False])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_constant_retraction_changes_no_output(
    cache: str, is_overlap: bool, page_size: int
) -> None:
    limits = make_limits(num_pages=144 // page_size, page_size=page_size, max_running_reqs=16)
    config = make_config(headroom_tokens=0, is_overlap=is_overlap)
    harness = Harness(limits, config, cache)
    for seed in range(24):
        harness.submit(prompt_of(3 + seed % 5, seed), max_tokens=60, ignore_eos=True)
    harness.run()
    harness.check_all()
    assert harness.scheduler.stats().num_retractions >= 8


def test_under_constant_retraction_the_oldest_request_never_stands_still() -> None:
    limits = make_limits(num_pages=100, page_size=1, max_running_reqs=16)
    harness = Harness(limits, make_config(headroom_tokens=0))
    for seed in range(12):
        harness.submit(prompt_of(4, seed), max_tokens=80, ignore_eos=True)
    harness.run(max_steps=12 * 80 * 6)
    steps = harness.outcomes[0].token_steps
    assert max(after - before for before, after in zip(steps, steps[1:], strict=False)) <= 6
    harness.check_all()


def test_admission_learns_to_leave_room() -> None:
    limits = make_limits(num_pages=400, page_size=1, max_running_reqs=32)
    harness = Harness(limits, make_config(headroom_tokens=0))
    for seed in range(100):
        harness.submit(prompt_of(4, seed), max_tokens=80, ignore_eos=True)
    harness.run()
    harness.check_all()
    assert harness.scheduler.stats().num_retractions < 100


@pytest.mark.parametrize("cache", ["radix", "naive"])
def test_reserving_admission_never_retracts(cache: str) -> None:
    limits = make_limits(num_pages=40, page_size=4, max_running_reqs=16)
    harness = Harness(limits, make_config(admission="reserve"), cache)
    for seed in range(30):
        harness.submit(prompt_of(3 + seed % 9, seed % 7), max_tokens=1 + 9 * seed % 70)
    harness.run()
    harness.check_all()
    assert harness.scheduler.stats().num_retractions == 0


def test_optimistic_admission_runs_more_requests_at_once() -> None:
    numbers = {}
    for admission in ("optimistic", "reserve"):
        limits = make_limits(num_pages=64, page_size=4, max_running_reqs=16)
        harness = Harness(limits, make_config(admission=admission, headroom_tokens=8))
        for seed in range(8):
            harness.submit(prompt_of(4, seed), max_tokens=100, stop_token_ids=tuple(range(40)))
        harness.step()
        numbers[admission] = harness.scheduler.stats().num_running
    assert numbers == {"optimistic": 8, "reserve": 2}


@pytest.mark.parametrize("page_size", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("num_spare", [0, 1])
def test_decoding_over_a_page_edge_with_the_last_pages(page_size: int, num_spare: int) -> None:
    # Two requests fill the pool up to the edge; then there is a page for one of them, or none.
    limits = make_limits(num_pages=4 + num_spare, page_size=page_size, max_seq_len=5 * page_size)
    harness = Harness(limits, make_config(headroom_tokens=0), "naive")
    for seed in range(2):
        harness.submit(prompt_of(2 * page_size, seed), max_tokens=page_size + 1, ignore_eos=True)
    harness.run()
    harness.check_all()
    assert harness.scheduler.stats().num_retractions == 1


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_request_may_fill_the_pool_to_the_last_slot(page_size: int) -> None:
    limits = make_limits(num_pages=44 // page_size, page_size=page_size)
    harness = Harness(limits, make_config())
    harness.submit(prompt_of(40), max_tokens=100, ignore_eos=True)
    harness.run()
    harness.check_all()
    end = harness.outcomes[0].end
    assert (end.reason, end.num_output_tokens) == ("length", 5)  # the last one needs no slot


@pytest.mark.parametrize(("prompt_len", "num_output"), [(43, 2), (44, 1)])
def test_a_prompt_that_just_fits_the_pool_gets_what_room_is_left(
    prompt_len: int, num_output: int
) -> None:
    harness = Harness(make_limits(num_pages=11, page_size=4), make_config())
    harness.submit(prompt_of(prompt_len), max_tokens=100, ignore_eos=True)
    harness.run()
    harness.check_all()
    assert harness.outcomes[0].end.num_output_tokens == num_output


def test_a_prompt_one_over_the_pool_is_refused_with_the_numbers() -> None:
    harness = Harness(make_limits(num_pages=11, page_size=4), make_config())
    harness.submit(prompt_of(45), max_tokens=1)
    harness.step()
    end = harness.outcomes[0].end
    assert end.reason == "error"
    assert end.detail == (
        "the prompt has 45 tokens: the KV pool holds 44 tokens, so it may have at most 44"
    )


def test_the_cache_gives_way_to_requests() -> None:
    harness = Harness(make_limits(num_pages=16, page_size=4), make_config())
    for seed in range(10):
        harness.submit(prompt_of(40, seed), max_tokens=8, ignore_eos=True)
        harness.run()
    harness.check_all()
    assert harness.scheduler.stats().num_retractions == 0
