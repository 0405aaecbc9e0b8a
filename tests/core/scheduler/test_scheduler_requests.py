"""What goes in, and the one terminal result that comes out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from minisgl.message.types import (
    ExitMsg,
    FlushMsg,
    FlushReply,
    ResultMsg,
    StatsMsg,
    StatsReply,
    UserMsg,
)
from minisgl.plugin.records import RequestRecord
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.io import DeadlineIO, ObservedIO, OfflineIO
from minisgl.scheduler.runner import StepRunner
from minisgl.scheduler.scheduler import Scheduler
from minisgl.testing.fake_engine import FakeEngine, make_limits
from tests.core.scheduler.harness import Harness, make_cache, make_config, make_policy

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.mark.parametrize(
    ("prompt", "detail"),
    [
        ([], "the prompt is empty: it must have at least 1 token"),
        ([1, 97], "token id 97: must be from 0 to 96"),
        ([1, -1], "token id -1: must be from 0 to 96"),
        (
            [1] * 128,
            "the prompt has 128 tokens: the context limit is 128 tokens, "
            "so it may have at most 127",
        ),
        (
            [1] * 1280,
            "the prompt has 1280 tokens: the context limit is 128 tokens, "
            "so it may have at most 127",
        ),
    ],
)
def test_a_request_that_can_never_run_is_refused_alone(prompt: list[int], detail: str) -> None:
    harness = Harness()
    bad = harness.submit(prompt, max_tokens=4)
    good = harness.submit(PROMPT, max_tokens=4)
    harness.run()
    harness.check_all()
    end = harness.outcomes[bad].end
    assert (end.reason, end.detail, end.num_output_tokens) == ("error", detail, 0)
    assert harness.outcomes[good].end.reason == "length"


@pytest.mark.parametrize("ids", [np.zeros((1, 3), np.int32), np.array([0.5, 1.0])])
def test_a_prompt_of_the_wrong_kind_is_refused(ids: np.ndarray) -> None:
    harness = Harness()
    harness.submit([1], uid=0)
    harness.io.put([UserMsg(1, ids, SamplingParams())])
    harness.outcomes[1] = type(harness.outcomes[0])()
    harness.run()
    assert "must be a list of token ids" in harness.outcomes[1].end.detail


def test_a_prompt_of_the_context_limit_less_one_gets_one_token() -> None:
    harness = Harness()
    harness.submit([1] * 127, max_tokens=None, ignore_eos=True)
    harness.run()
    harness.check_all()
    assert harness.outcomes[0].end.num_output_tokens == 1


@pytest.mark.parametrize(("max_tokens", "num_output"), [(1, 1), (2, 2), (10**9, 120), (None, 120)])
def test_max_tokens_is_met_exactly_or_cut_to_the_context(
    max_tokens: int | None, num_output: int
) -> None:
    harness = Harness()
    harness.submit(PROMPT, max_tokens=max_tokens, ignore_eos=True)
    harness.run()
    harness.check_all()
    end = harness.outcomes[0].end
    assert (end.reason, end.num_output_tokens) == ("length", num_output)


def test_a_full_queue_refuses_with_the_numbers() -> None:
    harness = Harness(make_limits(max_running_reqs=1), config=make_config(max_queued_requests=2))
    for _ in range(4):  # one can start at once, two wait
        harness.submit(PROMPT, max_tokens=1)
    harness.run()
    ends = [harness.outcomes[uid].end for uid in range(4)]
    assert [end.reason for end in ends] == ["length", "length", "length", "error"]
    assert ends[3].detail == "the queue is full: 3 requests run or wait, at most 3 may"
    assert [end.refusal for end in ends] == ["", "", "", "full"]


def test_a_stop_says_which_token_it_was() -> None:
    harness = Harness(make_limits(eos_token_ids=frozenset(range(0, 97, 7))))
    for seed in range(12):
        harness.submit([*PROMPT, seed], max_tokens=100)
    harness.run()
    harness.check_all()
    ends = [outcome.end for outcome in harness.outcomes.values()]
    assert all(end.reason == "stop" and end.stop_token_id in range(0, 97, 7) for end in ends)


def test_stop_token_ids_count_even_when_eos_is_ignored() -> None:
    harness = Harness(make_limits(eos_token_ids=frozenset(range(50))))
    harness.submit(PROMPT, max_tokens=100, ignore_eos=True, stop_token_ids=tuple(range(90, 97)))
    harness.run()
    harness.check_all()
    end = harness.outcomes[0].end
    assert end.stop_token_id in range(90, 97)
    assert harness.outcomes[0].tokens[-1] == end.stop_token_id


def test_a_stop_at_the_last_token_is_a_stop_and_not_a_length() -> None:
    plain = Harness()
    plain.submit(PROMPT, max_tokens=3, ignore_eos=True)
    plain.run()
    last = plain.outcomes[0].tokens[-1]
    harness = Harness()
    harness.submit(PROMPT, max_tokens=3, stop_token_ids=(last,))
    harness.run()
    assert harness.outcomes[0].end.reason == "stop"


@pytest.mark.parametrize("is_overlap", [True, False])
@pytest.mark.parametrize("num_steps", range(9))
def test_an_abort_at_any_moment_ends_one_request_and_frees_all_of_it(
    num_steps: int, is_overlap: bool
) -> None:
    config = make_config(max_prefill_length=10, is_overlap=is_overlap)
    harness = Harness(make_limits(max_running_reqs=2), config)
    for seed in range(4):
        harness.submit([seed] * 15, max_tokens=3)
    for _ in range(num_steps):
        harness.step()
    for uid in range(0, 4, 2):
        harness.abort(uid)
    harness.run()
    harness.check_all()
    stats = harness.scheduler.stats()
    assert stats.num_running == 0
    assert stats.num_free_pages + stats.num_evictable_pages == stats.num_pages
    assert {harness.outcomes[uid].end.reason for uid in (1, 3)} == {"length"}


def test_an_abort_of_a_finished_or_unknown_request_is_harmless() -> None:
    harness = Harness()
    harness.submit(PROMPT, max_tokens=2)
    harness.run()
    harness.abort(0)
    harness.abort(99)
    harness.abort(-1)
    harness.run()
    assert harness.outcomes[0].end.reason == "length"


def test_an_aborted_request_frees_its_place_within_two_steps() -> None:
    harness = Harness(make_limits(max_running_reqs=1))
    harness.submit(PROMPT, max_tokens=100, ignore_eos=True)
    harness.step()
    waiting = harness.submit([9, 9], max_tokens=1)
    harness.step()
    harness.abort(0)
    for _ in range(3):
        harness.step()
    assert harness.outcomes[0].end.reason == "abort"
    assert harness.outcomes[waiting].end.reason == "length"


def test_a_uid_can_be_used_again_after_its_end_but_not_before() -> None:
    harness = Harness()
    harness.submit(PROMPT, uid=7, max_tokens=5)
    harness.step()
    first = harness.sent[7]
    harness.submit([1, 2], uid=7, max_tokens=1)
    harness.sent[7] = first
    harness.run()
    harness.check(7)  # as if there had been no second one
    harness.outcomes.clear()
    harness.submit([1, 2], uid=7, max_tokens=1)
    harness.run()
    harness.check(7)


def test_a_deadline_ends_a_request_wherever_it_is() -> None:
    now_s = [0.0]
    harness = make_wrapped(lambda io: DeadlineIO(io, lambda: now_s[0]))
    ids = np.array(PROMPT, dtype=np.int32)
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    harness.io.put(UserMsg(uid, ids, params, deadline_s=2.5) for uid in range(2))  # one runs
    harness.io.put([UserMsg(2, ids, SamplingParams(max_tokens=2), deadline_s=100.0)])
    harness.step()
    assert harness.ends() == {}
    now_s[0] = 3.0
    while harness.scheduler.has_work:
        harness.step()
    ends = harness.ends()
    assert {uid: reason for uid, (reason, _) in ends.items()} == {
        0: "abort",
        1: "abort",
        2: "length",
    }
    assert ends[0][1] == "the deadline of 2.5 s has passed"


def test_the_deadline_of_a_dropped_request_is_not_that_of_the_open_one() -> None:
    now_s = [0.0]
    harness = make_wrapped(lambda io: DeadlineIO(io, lambda: now_s[0]))
    ids = np.array(PROMPT, dtype=np.int32)
    harness.io.put([UserMsg(0, ids, SamplingParams(max_tokens=5, ignore_eos=True))])
    harness.io.put([UserMsg(0, ids, SamplingParams(max_tokens=5), deadline_s=1.0)])
    harness.step()
    now_s[0] = 2.0
    while harness.scheduler.has_work:
        harness.step()
    assert harness.ends() == {0: ("length", "")}


def test_an_observer_is_told_once_how_a_request_went() -> None:
    now_s = [0.0]
    records: list[RequestRecord] = []
    harness = make_wrapped(lambda io: ObservedIO(io, records.append, lambda: now_s[0]))
    ids = np.array(PROMPT, dtype=np.int32)
    harness.io.put([UserMsg(0, ids, SamplingParams(max_tokens=3, ignore_eos=True))])
    harness.io.put([UserMsg(1, ids[:0], SamplingParams())])
    for _ in range(6):
        harness.step()
        now_s[0] += 1.0
    refused, done = records
    assert (refused.uid, refused.finish_reason, refused.first_token_s) == (1, "error", None)
    assert (done.finish_reason, done.num_prompt_tokens, done.num_output_tokens) == ("length", 8, 3)
    assert (done.first_token_s, done.duration_s) == (1.0, 3.0)


def test_a_flush_forgets_what_nobody_uses_and_says_how_much() -> None:
    harness = Harness()
    harness.submit(PROMPT * 2, max_tokens=1)
    harness.run()
    harness.submit([50] * 9, max_tokens=20, ignore_eos=True)
    harness.step()
    harness.io.put([FlushMsg()])
    harness.scheduler.step()
    assert FlushReply(num_flushed_pages=4, num_kept_pages=2) in harness.io.take()
    harness.submit(PROMPT * 2, max_tokens=1)
    harness.run()
    assert harness.outcomes[2].end.num_cached_tokens == 0


def test_stats_come_when_asked_for() -> None:
    harness = Harness()
    harness.submit(PROMPT, max_tokens=3, ignore_eos=True)
    harness.run()
    harness.io.put([StatsMsg()])
    harness.scheduler.step()
    (reply,) = harness.io.take()
    assert isinstance(reply, StatsReply)
    assert reply.stats.num_finished == {"stop": 0, "length": 1, "abort": 0, "error": 0}
    assert (reply.stats.num_prefill_tokens, reply.stats.num_output_tokens) == (8, 3)


def test_leaving_gives_everyone_left_a_terminal_result() -> None:
    harness = Harness(make_limits(max_running_reqs=2))
    for seed in range(5):
        harness.submit([seed] * 5, max_tokens=100, ignore_eos=True)
    for _ in range(4):
        harness.step()
    harness.io.put([ExitMsg()])
    harness.scheduler.run_forever()
    harness.collect()
    harness.check_all()
    ends = [harness.outcomes[uid].end for uid in range(5)]
    assert {end.detail for end in ends} == {"the engine is shutting down"}
    harness.scheduler.check_integrity()


@pytest.mark.parametrize("place", ["_wait_for", "_settle", "_launch"])
@pytest.mark.parametrize("nth", [1, 2, 5])
def test_after_an_interrupt_inside_a_step_the_scheduler_is_as_new(
    place: str, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness()
    countdown = [nth]
    method = getattr(StepRunner, place)

    def interrupted(*args: object) -> object:
        countdown[0] -= 1
        if countdown[0] == 0:
            raise KeyboardInterrupt
        return method(*args)

    monkeypatch.setattr(StepRunner, place, interrupted)
    for seed in range(4):
        harness.submit([seed] * 9, max_tokens=50)
    with pytest.raises(KeyboardInterrupt):
        harness.run()
    late = harness.submit(PROMPT, max_tokens=5)
    harness.run()
    harness.check(late)
    assert {harness.outcomes[uid].end.detail for uid in range(4)} == {"a step was interrupted"}


def test_an_idle_scheduler_sleeps_until_a_message_comes() -> None:
    engine = FakeEngine(make_limits())
    io = OfflineIO()
    scheduler = Scheduler(engine, make_cache("radix", 4), make_policy("fcfs"), io, make_config())
    thread = threading.Thread(target=scheduler.run_forever)
    thread.start()
    try:
        before_s = time.process_time()
        time.sleep(0.3)
        used_s = time.process_time() - before_s
        io.put([UserMsg(0, np.array(PROMPT, np.int32), SamplingParams(max_tokens=3))])
    finally:
        io.put([ExitMsg()])
        thread.join(timeout=20)
    assert not thread.is_alive()
    assert used_s < 0.1  # seconds of the whole process
    finished = [f for reply in io.take() if isinstance(reply, ResultMsg) for f in reply.finished]
    assert [end.uid for end in finished] == [0]


class Wrapped:
    """A scheduler whose line is wrapped in another one."""

    def __init__(self, scheduler: Scheduler, io: OfflineIO) -> None:
        self.scheduler = scheduler
        self.io = io
        self._ends: dict[int, tuple[str, str]] = {}

    def step(self) -> None:
        self.scheduler.step()
        for reply in self.io.take():
            if isinstance(reply, ResultMsg):
                self._ends |= {end.uid: (end.reason, end.detail) for end in reply.finished}

    def ends(self) -> dict[int, tuple[str, str]]:
        return self._ends


def make_wrapped(wrap: Callable[[OfflineIO], DeadlineIO | ObservedIO]) -> Wrapped:
    limits = make_limits(max_running_reqs=1)
    io = OfflineIO()
    scheduler = Scheduler(
        FakeEngine(limits), make_cache("radix", 4), make_policy("fcfs"), wrap(io), make_config()
    )
    return Wrapped(scheduler, io)
