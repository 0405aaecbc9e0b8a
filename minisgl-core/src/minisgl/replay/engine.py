"""An engine whose steps give the recorded tokens, whatever it computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import numpy as np

from minisgl.core import Batch
from minisgl.engine.contract import (
    EngineLimits,
    ForwardOutput,
    PromptScores,
    StepEngine,
    StepResult,
    TokenLogprobs,
)
from minisgl.engine.logprobs import plan_scores
from minisgl.replay.requests import Script
from minisgl.scheduler.contract import ScheduledReq


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """The first token of a request that came out different.

    Attributes:
        tick: When.
        uid: The request.
        index: Of the token in the output.
        recorded: The token of the trace.
        replayed: The token that was sampled here.
    """

    tick: int
    uid: int
    index: int
    recorded: int
    replayed: int


class Place(NamedTuple):
    """Whose token one row of a result is, and which of its output."""

    req: ScheduledReq
    script: Script
    token_index: int


class ScriptedEngine(StepEngine):
    """Replaces what an engine samples, and compares it where the model should have chosen it.

    Attributes:
        differences: Of each request the first token that was another, in order.
    """

    def __init__(self, inner: StepEngine, tick: Callable[[], int]) -> None:
        """Stand around an engine.

        Args:
            inner: Computes.
            tick: The scheduler's clock.
        """
        self.limits = inner.limits
        self.backends = inner.backends
        self.picked = inner.picked
        self.differences: list[TokenDifference] = []
        self._inner = inner
        self._tick = tick
        self._scripts: dict[int, Script] = {}

    def expect(self, script: Script) -> None:
        """Take the script of a request that is about to come in."""
        self._scripts[script.arrival.uid] = script

    def forward_batch(self, batch: Batch) -> ForwardOutput:
        """Launch a step; see `StepEngine.forward_batch`."""
        host = batch.host
        assert host is not None, "the scheduler sets batch.host"
        flags = batch.is_sampled if batch.is_prefill else [True] * batch.size
        rows = zip(batch.reqs, host.seq_lens.tolist(), flags, strict=True)
        places = [
            Place(cast("ScheduledReq", req), self._scripts[req.uid], seq_len - req.prompt_len)
            for req, seq_len, is_sampled in rows
            if is_sampled
        ]
        return _ScriptedOutput(self._inner.forward_batch(batch), self, places)

    def rewrite(self, result: StepResult, places: list[Place]) -> StepResult:
        """Put the known tokens in place of the sampled ones.

        Whether one of them ends its request is part of the recording too, and does not follow from
        the token where tokens are made up: so the request is told.
        """
        tokens = result.token_ids.copy()
        for row, (req, script, index) in enumerate(places):
            known = script.output_token(index)
            if known is None:
                continue
            if known != tokens[row] and script.is_comparable:
                self._note(script, index, int(tokens[row]))
            tokens[row] = known
            req.stop_ids = frozenset((known,)) if script.is_stop(index) else frozenset()
        return replace(result, token_ids=tokens)

    def _note(self, script: Script, index: int, token: int) -> None:
        uid, known = script.arrival.uid, script.output_token(index)
        assert known is not None, "a token that is not known cannot differ"
        if all(each.uid != uid for each in self.differences):
            self.differences.append(TokenDifference(self._tick(), uid, index, known, token))


class _ScriptedOutput(ForwardOutput):
    """A launched step whose tokens are replaced when they come."""

    def __init__(self, inner: ForwardOutput, engine: ScriptedEngine, places: list[Place]) -> None:
        self._inner = inner
        self._engine = engine
        self._places = places

    def wait(self) -> StepResult:
        """Wait; see `ForwardOutput.wait`."""
        return self._engine.rewrite(self._inner.wait(), self._places)


class IdleEngine(StepEngine):
    """Computes nothing: for replays that are about decisions alone."""

    def __init__(self, limits: EngineLimits) -> None:
        """Claim to have these sizes."""
        self.limits = limits

    def forward_batch(self, batch: Batch) -> ForwardOutput:
        """Sample token 0 for everybody, and score prompts with 0."""
        num_sampled = batch.size if batch.is_decode else sum(batch.is_sampled)
        scores: list[PromptScores] = []
        if batch.is_prefill:
            none = TokenLogprobs(0, 0.0, (), ())
            spans = plan_scores(batch).spans
            scores = [PromptScores(index, start, [none] * num) for index, start, num, _ in spans]
        return _IdleOutput(StepResult(np.zeros(num_sampled, np.int32), {}, scores))


class _IdleOutput(ForwardOutput):
    """A step that needed no time."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        """Return the result; see `ForwardOutput.wait`."""
        return self._result
