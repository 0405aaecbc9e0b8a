"""Requests that want their prompts scored, and requests that use the uid of another."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl.core import Batch
from minisgl.message.types import ResultMsg, UserMsg
from minisgl.plugin.records import RequestRecord
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.io import DeadlineIO, ObservedIO, OfflineIO
from minisgl.testing.fake_engine import make_limits
from tests.core.scheduler.harness import Harness, make_config

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
WIDE = 2**25  # so wide a vocabulary that the logits of two tokens are the most of a step


def test_a_step_keeps_only_so_many_logits_for_prompts() -> None:
    harness = Harness(make_limits(vocab_size=WIDE))
    lens: list[int] = []
    harness.engine.on_launch = lambda batch: lens.append(num_scored(batch))
    for _ in range(3):
        harness.submit(PROMPT, max_tokens=2, prompt_logprobs=1)
    harness.submit(PROMPT, max_tokens=2)
    harness.run()
    harness.check_all()
    assert max(lens) == 2


def num_scored(batch: Batch) -> int:
    assert batch.host is not None
    lens = batch.host.seq_lens - batch.host.cached_lens
    is_scoring = [req.is_scoring for req in batch.reqs]
    return int(lens[is_scoring].sum()) if batch.is_prefill else 0


def test_a_scored_prompt_is_not_taken_from_the_cache_but_given_to_it() -> None:
    harness = Harness()
    for _ in range(2):
        harness.submit(PROMPT, max_tokens=1, prompt_logprobs=0)
        harness.run()
    assert harness.engine.num_prefill_tokens == 2 * len(PROMPT)
    harness.submit(PROMPT, max_tokens=1)
    harness.run()
    assert harness.engine.num_prefill_tokens < 3 * len(PROMPT)


@pytest.mark.parametrize("is_overlap", [True, False])
def test_a_request_for_no_tokens_gets_none(is_overlap: bool) -> None:
    harness = Harness(config=make_config(is_overlap=is_overlap))
    uid = harness.submit(PROMPT, max_tokens=0, prompt_logprobs=0)
    harness.run()
    outcome = harness.outcomes[uid]
    assert (outcome.tokens, outcome.end.reason) == ([], "length")
    assert (outcome.end.num_prompt_tokens, outcome.end.num_output_tokens) == (len(PROMPT), 0)


def user(uid: int, deadline_s: float | None = None) -> UserMsg:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    return UserMsg(uid, np.array(PROMPT, np.int32), params, deadline_s=deadline_s)


def test_a_second_request_of_a_uid_does_not_move_the_deadline_of_the_first() -> None:
    now_s = [0.0]
    line = OfflineIO()
    io = DeadlineIO(line, lambda: now_s[0])
    line.put([user(1, deadline_s=5.0)])
    io.receive(block=False)
    line.put([user(1, deadline_s=1.0)])
    now_s[0] = 3.0
    assert len(io.receive(block=False)) == 1
    now_s[0] = 6.0
    assert [type(message).__name__ for message in io.receive(block=False)] == ["AbortMsg"]


def test_a_second_request_of_a_uid_does_not_change_when_the_first_came() -> None:
    now_s = [0.0]
    records: list[RequestRecord] = []
    line = OfflineIO()
    io = ObservedIO(line, records.append, lambda: now_s[0])
    harness = Harness()
    for arrival_s in (0.0, 4.0):
        now_s[0] = arrival_s
        line.put([user(1)])
        harness.io.put(io.receive(block=False))
        harness.scheduler.step()
    now_s[0] = 10.0
    while harness.scheduler.has_work:
        harness.scheduler.step()
    io.send([reply for reply in harness.io.take() if isinstance(reply, ResultMsg)])
    assert [record.duration_s for record in records] == [10.0]
