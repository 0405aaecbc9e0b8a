"""Random loads on a scheduler over a fake engine, recorded and replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from minisgl.core import SamplingParams
from minisgl.engine.contract import EngineLimits, StepEngine
from minisgl.kvcache.contract import CacheConfig, PrefixCache
from minisgl.kvcache.naive import NaiveCache
from minisgl.kvcache.radix import RadixCache
from minisgl.message.types import AbortMsg, FlushMsg, ResultMsg, UserMsg
from minisgl.replay.compare import Report
from minisgl.replay.engine import IdleEngine
from minisgl.replay.run import Replay
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.contract import Policy, PolicyConfig
from minisgl.scheduler.io import OfflineIO, SchedulerIO
from minisgl.scheduler.policy import FcfsPolicy, LpmPolicy, PriorityPolicy
from minisgl.scheduler.record import PrefixNames, Tap
from minisgl.scheduler.recorder import plain_limits
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.trace import TRACE_FORMAT, Event, Header, Trace, encode_line
from minisgl.scheduler.trace_reading import read_trace
from minisgl.testing.fake_engine import FakeEngine, make_limits

EOS = frozenset({7, 8})
End = Literal["drained", "shutdown", "cut"]
CACHES: dict[str, Callable[[CacheConfig], PrefixCache]] = {"radix": RadixCache, "naive": NaiveCache}
POLICIES: dict[str, Callable[[PolicyConfig], Policy]] = {
    "fcfs": FcfsPolicy,
    "lpm": LpmPolicy,
    "priority": PriorityPolicy,
}


@dataclass(frozen=True)
class Setup:
    """What a scheduler is made of."""

    limits: EngineLimits = make_limits(
        num_pages=24, max_running_reqs=5, max_seq_len=64, eos_token_ids=EOS
    )
    config: SchedulerConfig = SchedulerConfig(
        max_prefill_length=12, headroom_tokens=0, min_shared_tokens=4, is_checked_every_step=True
    )
    cache: str = "radix"
    policy: str = "fcfs"

    def build(self, engine: StepEngine, line: SchedulerIO) -> Scheduler:
        cache = CACHES[self.cache](CacheConfig(page_size=self.limits.page_size))
        return Scheduler(engine, cache, POLICIES[self.policy](PolicyConfig()), line, self.config)

    def with_page_size(self, page_size: int) -> Setup:
        num_tokens = self.limits.num_pages * self.limits.page_size
        limits = replace(self.limits, page_size=page_size, num_pages=num_tokens // page_size)
        return replace(self, limits=limits)


def record(
    setup: Setup, path: Path, seed: int = 0, *, has_prompts: bool = False, end: End = "drained"
) -> Trace:
    """Run a random load and read what was recorded of it.

    It ends when all requests have ended, with a shutdown while some are open, or cut off.
    """
    header = Header(
        format=TRACE_FORMAT,
        version="0",
        created="",
        settings={},
        limits=plain_limits(setup.limits),
        backends={},
        block_size=setup.limits.page_size,
        has_prompts=has_prompts,
    )
    with path.open("wb") as file:
        file.write(encode_line(header))

        def sink(event: Event) -> None:
            file.write(encode_line(event))

        tap = Tap(sink, PrefixNames(setup.limits.page_size), has_prompts=has_prompts)
        _Load(setup, tap, seed).run(end)
        if end != "cut":
            tap.end()
    return read_trace(path)


def replayed(trace: Trace, setup: Setup, engine: StepEngine | None = None) -> Report:
    """Replay on an engine that computes nothing, or on the given one."""
    has_model = engine is not None
    engine = IdleEngine(setup.limits) if engine is None else engine
    return Replay(trace, engine, setup.build, has_model=has_model).run()


class _Load:
    """Requests that share prefixes, stop, are aborted, and come when they like."""

    def __init__(self, setup: Setup, tap: Tap, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._setup = setup
        self._io = OfflineIO()
        self._scheduler = setup.build(*tap.attach(FakeEngine(setup.limits), self._io))
        self._known = [self._tokens(20)]
        self._texts: list[list[int]] = []  # of each request, prompt and output

    def run(self, end: End) -> None:
        for _ in range(120):
            if self._random.random() < 0.35:
                self._arrive()
            if self._random.random() < 0.05:
                self._io.put([AbortMsg(int(self._random.integers(0, len(self._texts) + 2)))])
            if self._random.random() < 0.02:
                self._io.put([FlushMsg()])
            self._step()
        while self._scheduler.has_work and end == "drained":
            self._step()
        if end != "cut":
            self._scheduler.shutdown()

    def _step(self) -> None:
        if self._scheduler.has_work or self._io.has_messages:
            self._scheduler.step()
        for reply in self._io.take():
            if isinstance(reply, ResultMsg):
                for uid, token_id in zip(reply.uids, reply.token_ids, strict=True):
                    self._texts[uid].append(token_id)
                self._known += [np.array(self._texts[each.uid][:40]) for each in reply.finished]

    def _arrive(self) -> None:
        random = self._random
        known = self._known[int(random.integers(0, len(self._known)))]
        prompt = np.concatenate(
            (
                known[: int(random.integers(0, len(known) + 1))],
                self._tokens(int(random.integers(1, 12))),
            )
        )
        if random.random() < 0.05:
            prompt = self._tokens(200)  # too long for the engine
        if random.random() < 0.03:
            prompt[-1] = 1000  # no token of the vocabulary
        self._texts.append((prompt % self._setup.limits.vocab_size).tolist())
        params = SamplingParams(
            max_tokens=int(random.integers(1, 24)),
            ignore_eos=bool(random.random() < 0.5),
            stop_token_ids=(11,) if random.random() < 0.3 else (),
        )
        priority = int(random.integers(-1, 2))
        uid = len(self._texts) - 1
        self._io.put([UserMsg(uid, prompt.astype(np.int32), params, priority)])

    def _tokens(self, count: int) -> np.ndarray:
        return self._random.integers(0, 30, count).astype(np.int32)
