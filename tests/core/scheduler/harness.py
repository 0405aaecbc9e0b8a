"""Drives a scheduler over the fake engine and compares every result with the history alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from minisgl.engine.contract import EngineLimits
from minisgl.kvcache.contract import CacheConfig, PrefixCache
from minisgl.kvcache.naive import NaiveCache
from minisgl.kvcache.radix import RadixCache
from minisgl.message.types import AbortMsg, FinishedReq, ResultMsg, UserMsg
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.contract import Policy, PolicyConfig
from minisgl.scheduler.io import OfflineIO
from minisgl.scheduler.policy import FcfsPolicy, LpmPolicy, PriorityPolicy
from minisgl.scheduler.scheduler import Scheduler
from minisgl.testing.fake_engine import FakeEngine, make_limits


def make_config(**fields: object) -> SchedulerConfig:
    """Make a strict configuration: books are checked, and what the fake finds wrong is raised."""
    strict: dict[str, object] = {"is_checked_every_step": True, "is_isolating": False}
    return SchedulerConfig(**{**strict, **fields})  # type: ignore[arg-type]  # fields of any type


def make_cache(name: str, page_size: int) -> PrefixCache:
    config = CacheConfig(page_size)
    return RadixCache(config) if name == "radix" else NaiveCache(config)


def make_policy(name: str) -> Policy:
    policies: dict[str, Callable[[PolicyConfig], Policy]] = {
        "fcfs": FcfsPolicy,
        "lpm": LpmPolicy,
        "priority": PriorityPolicy,
    }
    return policies[name](PolicyConfig())


@dataclass
class Outcome:
    """What came back for one request."""

    tokens: list[int] = field(default_factory=list)
    finished: list[FinishedReq] = field(default_factory=list)
    token_steps: list[int] = field(default_factory=list)

    @property
    def end(self) -> FinishedReq:
        assert len(self.finished) == 1, f"{len(self.finished)} terminal results"
        return self.finished[0]


class Harness:
    """A scheduler with fakes around it; ``clock`` counts its steps."""

    def __init__(
        self,
        limits: EngineLimits | None = None,
        config: SchedulerConfig | None = None,
        cache: str = "radix",
        policy: str = "fcfs",
    ) -> None:
        limits = make_limits() if limits is None else limits
        config = make_config() if config is None else config
        self.engine = FakeEngine(limits)
        self.io = OfflineIO()
        self.cache = make_cache(cache, limits.page_size)
        self.scheduler = Scheduler(self.engine, self.cache, make_policy(policy), self.io, config)
        self.sent: dict[int, UserMsg] = {}
        self.outcomes: dict[int, Outcome] = {}
        self.clock = 0

    def submit(self, prompt: list[int], uid: int | None = None, **params: object) -> int:
        """Send a request; ``priority`` and ``deadline_s`` aside, keywords are for sampling."""
        priority = params.pop("priority", 0)
        assert isinstance(priority, int)
        uid = len(self.sent) if uid is None else uid
        sampling = SamplingParams(**params)  # type: ignore[arg-type]  # keywords of any type
        message = UserMsg(uid, np.array(prompt, dtype=np.int32), sampling, priority)
        self.sent[uid] = message
        self.outcomes.setdefault(uid, Outcome())
        self.io.put([message])
        return uid

    def abort(self, uid: int) -> None:
        self.io.put([AbortMsg(uid)])

    def step(self) -> None:
        self.scheduler.step()
        self.clock += 1
        self.collect()

    def collect(self) -> None:
        for reply in self.io.take():
            if not isinstance(reply, ResultMsg):
                continue
            for uid, token in zip(reply.uids, reply.token_ids, strict=True):
                outcome = self.outcomes[uid]
                assert not outcome.finished, f"request {uid} got a token after its end"
                outcome.tokens.append(token)
                outcome.token_steps.append(self.clock)
            for finished in reply.finished:
                self.outcomes[finished.uid].finished.append(finished)

    def run(self, max_steps: int = 100_000) -> None:
        """Step until nothing is left to do."""
        for _ in range(max_steps):
            self.step()
            if not self.scheduler.has_work and not self.io.has_messages:
                self.scheduler.check_integrity()
                return
        raise AssertionError(f"not done after {max_steps} steps: {self.scheduler.stats()}")

    def expected(self, uid: int) -> list[int]:
        """What the request gets if nothing disturbs it."""
        message, limits = self.sent[uid], self.engine.limits
        params = message.sampling_params
        room = min(limits.max_seq_len, limits.num_pages * limits.page_size + 1)
        num_tokens = room - len(message.input_ids)
        if params.max_tokens is not None:
            num_tokens = min(num_tokens, params.max_tokens)
        stops = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stops |= limits.eos_token_ids
        return self.engine.model.generate(message.input_ids.tolist(), num_tokens, stops)

    def check(self, uid: int) -> None:
        """Compare the outcome of a request with the history-only reference."""
        outcome = self.outcomes[uid]
        end = outcome.end
        assert end.num_output_tokens == len(outcome.tokens)
        if end.reason == "error":
            assert end.detail
            assert "internal" not in end.detail
            return
        expected = self.expected(uid)
        if end.reason == "abort":
            assert outcome.tokens == expected[: len(outcome.tokens)]
            return
        assert outcome.tokens == expected
        is_stop = end.reason == "stop"
        assert end.stop_token_id == (expected[-1] if is_stop else None)

    def check_all(self) -> None:
        for uid in self.sent:
            self.check(uid)
