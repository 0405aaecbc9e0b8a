"""Ctrl-C at any line of the engine's own code leaves an `LLM` that works."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

import minisgl
from minisgl import LLM, SamplingParams
from tests.e2e.offline_harness import (
    CheckedLLM,
    Tiny,
    assert_idle,
    greedy_params,
    ids_of,
    random_prompts,
    rank_of,
)
from tests.tiny_models import TinyModel

PROMPTS = random_prompts((9, 21, 3))
NUM_TOKENS = 5
OURS = tuple(minisgl.__path__)


class LineCounter:
    """Counts executed lines of minisgl and raises at one of them, as a signal handler would."""

    def __init__(self, at: int | None = None) -> None:
        self.num_lines = 0
        self._at = at

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:  # as sys.settrace has it
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        if event == "line":
            self.num_lines += 1
            if self.num_lines == self._at:
                raise KeyboardInterrupt
        return self


@contextmanager
def tracing(counter: LineCounter) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(counter)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny.save(tmp_path_factory.mktemp("interrupts"), TinyModel("llama", vocab_size=320))


@pytest.fixture(scope="module")
def expected(tiny: Tiny) -> list[list[int]]:
    return tiny.greedy(PROMPTS, NUM_TOKENS)


def open_llm(tiny: Tiny, *, overlap: bool = True) -> CheckedLLM:
    return tiny.open(max_prefill_length=16, max_running_req=2, overlap=overlap)


def generate(llm: LLM) -> object:
    return llm.generate(PROMPTS, greedy_params(NUM_TOKENS))


def stream(llm: LLM) -> object:
    return list(llm.stream(PROMPTS[1], greedy_params(NUM_TOKENS)))


def stream_closed(llm: LLM) -> object:
    chunks = llm.stream(PROMPTS[1], greedy_params(NUM_TOKENS))
    next(chunks)
    del chunks
    return None


def sample(llm: LLM) -> object:
    params = SamplingParams(
        max_tokens=4, temperature=1.0, n=2, stop="zz", logprobs=2, frequency_penalty=0.5
    )
    return llm.generate(PROMPTS[:2], params)


CALLS: dict[str, Callable[[LLM], object]] = {
    "generate": generate,
    "stream": stream,
    "stream closed": stream_closed,
    "sample": sample,
}


def interrupt_at(llm: LLM, call: Callable[[LLM], object], line: int) -> None:
    """Interrupt a call at its nth line; what a finalizer raises is not seen outside."""
    counter = LineCounter(line)
    with tracing(counter):
        try:
            call(llm)
        except KeyboardInterrupt:
            return
    assert counter.num_lines < line or call is stream_closed, "the interrupt was swallowed"


def count_lines(llm: LLM, call: Callable[[LLM], object]) -> int:
    counter = LineCounter()
    with tracing(counter):
        call(llm)
    return counter.num_lines


def assert_usable(llm: LLM, expected: list[list[int]]) -> None:
    assert ids_of(llm.generate(PROMPTS, greedy_params(NUM_TOKENS))) == expected
    assert_idle(llm)
    assert not llm._open


def check_every(tiny: Tiny, expected: list[list[int]], name: str, num_points: int) -> None:
    """Interrupt at ``num_points`` lines, evenly over the call, and use the object after each."""
    call = CALLS[name]
    for overlap in (True, False):
        with open_llm(tiny, overlap=overlap) as llm:
            generate(llm)  # warm, so that the count is that of the calls to come
            num_lines = count_lines(llm, call)
            step = max(num_lines // num_points, 1)
            for line in range(1, num_lines, step):
                interrupt_at(llm, call, line)
                assert_usable(llm, expected)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_leaves_a_usable_object(
    tiny: Tiny, expected: list[list[int]], name: str
) -> None:
    check_every(tiny, expected, name, num_points=11)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_at_many_lines_leaves_a_usable_object(
    tiny: Tiny, expected: list[list[int]], name: str
) -> None:
    check_every(tiny, expected, name, num_points=150)


def test_a_second_interrupt_while_the_first_is_dealt_with_is_harmless(
    tiny: Tiny, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_llm(tiny) as llm:
        monkeypatch.setattr(rank_of(llm)._scheduler, "step", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS)
        monkeypatch.undo()
        assert_usable(llm, expected)


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_a_stream_that_nobody_read_leaves_nothing_behind(tiny: Tiny) -> None:
    with open_llm(tiny) as llm:
        chunks = llm.stream(PROMPTS[0], greedy_params(NUM_TOKENS))
        assert llm._open
        del chunks
        assert not llm._open
        assert_idle(llm)


def test_an_interrupt_between_steps_spares_the_requests_of_others(
    tiny: Tiny, expected: list[list[int]]
) -> None:
    with open_llm(tiny) as llm:
        other = llm.stream(PROMPTS[0], greedy_params(NUM_TOKENS))
        found = next(other)["token_ids"]
        mine = llm.stream(PROMPTS[1], greedy_params(NUM_TOKENS))
        next(mine)
        mine.close()  # type: ignore[attr-defined]  # what a for loop does on an exception
        for chunk in other:
            found = found + chunk["token_ids"]
        assert found == expected[0]
        assert_idle(llm)


def test_an_interrupt_in_a_step_ends_the_requests_of_others_with_a_reason(tiny: Tiny) -> None:
    with open_llm(tiny) as llm:
        other = llm.stream(PROMPTS[0], greedy_params(50))
        next(other)
        interrupt_at(llm, generate, 3000)
        last = list(other)[-1]
        assert (last["finish_reason"], last["error"]) == ("abort", "a step was interrupted")
        assert_idle(llm)


class Cycle:
    """Keeps a stream in a reference cycle, so that only the garbage collector closes it."""

    def __init__(self, chunks: object) -> None:
        self.chunks = chunks
        self.me = self


def test_a_stream_that_is_collected_within_a_step_is_ended_after_it(
    tiny: Tiny, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_llm(tiny) as llm:
        Cycle(llm.stream(PROMPTS[0], greedy_params(50)))
        real_forward, collected = rank_of(llm)._engine.forward_batch, list[int]()

        def forward(batch: Any) -> Any:  # Any: handed on
            if not collected:
                collected.append(gc.collect())
            return real_forward(batch)

        monkeypatch.setattr(rank_of(llm)._engine, "forward_batch", forward)
        assert_usable(llm, expected)


def test_the_books_may_be_read_within_a_step(
    tiny: Tiny, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_llm(tiny) as llm:
        real_forward, running = rank_of(llm)._engine.forward_batch, list[int]()

        def forward(batch: Any) -> Any:  # Any: handed on
            running.append(llm.stats().num_running)
            return real_forward(batch)

        monkeypatch.setattr(rank_of(llm)._engine, "forward_batch", forward)
        assert_usable(llm, expected)
        assert max(running) == 2


@pytest.mark.parametrize("num_failures", [1, 3])
def test_a_step_that_fails_leaves_a_usable_object(
    tiny: Tiny,
    expected: list[list[int]],
    num_failures: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("CRITICAL")
    with open_llm(tiny) as llm:
        real_forward, left = rank_of(llm)._engine.forward_batch, [num_failures]

        def forward(batch: Any) -> Any:  # Any: handed on
            left[0] -= 1
            if left[0] >= 0:
                raise RuntimeError("out of luck")
            return real_forward(batch)

        monkeypatch.setattr(rank_of(llm)._engine, "forward_batch", forward)
        llm.generate(PROMPTS, greedy_params(NUM_TOKENS))  # some of them may end with an error
        assert_usable(llm, expected)
