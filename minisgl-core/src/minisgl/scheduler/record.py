"""Recording what a scheduler does: a tap on its line and on its engine.

`Tap` turns what passes into events of `minisgl.scheduler.trace`; where these go is its caller's
affair: to a file for ``--record``, to a list for ``minisgl replay``.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from minisgl.core import Batch, Req
from minisgl.engine.contract import ForwardOutput, StepEngine, StepResult
from minisgl.message.types import AbortMsg, FlushMsg, ReplyMsg, ResultMsg, SchedulerMsg, UserMsg
from minisgl.scheduler.contract import ScheduledReq
from minisgl.scheduler.io import SchedulerIO
from minisgl.scheduler.trace import (
    Abort,
    Again,
    Arrival,
    Decision,
    End,
    Ending,
    Event,
    Fault,
    Flush,
    Part,
    Restart,
    advanced,
)
from minisgl.scheduler.trace_params import plain_params

_NAME_BYTES = 8


class PrefixNames:
    """Names blocks of tokens by a keyed hash of the block and all before it.

    The key is drawn for each recording and kept nowhere, so names can be compared with one another
    and not with those of guessed texts.
    """

    def __init__(self, block_size: int) -> None:
        """Draw a key."""
        self.block_size = block_size
        self._key = os.urandom(32)

    def extend(self, last: str, tokens: np.ndarray) -> list[str]:
        """Name the whole blocks of ``tokens``.

        Args:
            last: Name of the block before; empty at the beginning.
            tokens: ``[n]`` int32; what is left behind the last whole block has no name.
        """
        names = []
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            block = np.ascontiguousarray(tokens[start : start + self.block_size], dtype=np.int32)
            digest = hashlib.blake2b(
                last.encode() + block.tobytes(), digest_size=_NAME_BYTES, key=self._key
            )
            last = digest.hexdigest()
            names.append(last)
        return names


@dataclass(slots=True)
class _Open:
    """A request without a terminal result; the tap alone changes it."""

    last: str  # name of its newest whole block
    rest: np.ndarray  # tokens behind that block
    output: list[int] = field(default_factory=list)


class Tap:
    """Sits between a scheduler, its line and its engine, and tells what passes.

    Attributes:
        tick: The scheduler's clock; a replay may move it on while there is nothing to do.
    """

    def __init__(
        self,
        sink: Callable[[Event], None],
        names: PrefixNames | None = None,
        *,
        has_prompts: bool = False,
    ) -> None:
        """Begin at tick 0.

        Args:
            sink: Takes each event.
            names: Names the blocks of prompts and outputs; ``None`` leaves names out.
            has_prompts: Whether to tell token ids.
        """
        self.tick = 0
        self._sink = sink
        self._names = names
        self._has_prompts = has_prompts
        self._started_s = time.monotonic()
        self._open: dict[int, _Open] = {}
        self._decoded: list[Part] = []
        self._vocab_size = 0

    def attach(self, engine: StepEngine, line: SchedulerIO) -> tuple[StepEngine, SchedulerIO]:
        """Return what a scheduler takes in place of its engine and its line."""
        self._vocab_size = engine.limits.vocab_size
        return _TappedEngine(engine, self), _TappedIO(line, self)

    def restart(self) -> None:
        """Note that the scheduler was replaced."""
        self._open.clear()
        self._decoded = []
        self._sink(Restart(self.tick, self._now_s()))

    def end(self) -> None:
        """Note that nothing more will come."""
        self._sink(End(self.tick, self._now_s()))

    def received(self, messages: Sequence[SchedulerMsg]) -> None:
        """Note messages to the scheduler; called at each tick."""
        for message in messages:
            match message:
                case UserMsg():
                    self._sink(self._arrival(message))
                case AbortMsg():
                    self._sink(Abort(self.tick, self._now_s(), message.uid, message.reason))
                case FlushMsg():
                    self._sink(Flush(self.tick, self._now_s()))

    def launched(self, batch: Batch, error: Exception | None = None) -> None:
        """Note a step that was given to the engine."""
        parts = parts_of(batch)
        is_next = batch.is_decode and error is None and parts == advanced(self._decoded)
        if batch.is_decode:
            self._decoded = parts
        if is_next:
            self._sink(Again(self.tick, self._now_s()))
        else:
            said = "" if error is None else _describe(error)
            self._sink(Decision(self.tick, self._now_s(), batch.phase, parts, said))

    def failed(self, error: Exception) -> None:
        """Note that waiting for a step has raised."""
        self._sink(Fault(self.tick, self._now_s(), _describe(error)))

    def sent(self, replies: Sequence[ReplyMsg]) -> None:
        """Note tokens and terminal results."""
        for reply in replies:
            if isinstance(reply, ResultMsg):
                for uid, token_id in zip(reply.uids, reply.token_ids, strict=True):
                    if uid in self._open:
                        self._open[uid].output.append(token_id)
                self._note_endings(reply)

    def _note_endings(self, reply: ResultMsg) -> None:
        for finished in reply.finished:
            req = self._open.pop(finished.uid, None)
            output = [] if req is None else req.output
            names: list[str] = []
            if req is not None and self._names is not None:
                tokens = np.concatenate((req.rest, np.array(output, dtype=np.int32)))
                names = self._names.extend(req.last, tokens)
            self._sink(
                Ending(
                    tick=self.tick,
                    time_s=self._now_s(),
                    uid=finished.uid,
                    reason=finished.reason,
                    num_tokens=finished.num_output_tokens,
                    num_cached=finished.num_cached_tokens,
                    detail=finished.detail,
                    blocks=names,
                    token_ids=output if self._has_prompts else None,
                )
            )

    def _arrival(self, message: UserMsg) -> Arrival:
        ids = np.asarray(message.input_ids)
        is_valid = ids.ndim == 1 and ids.dtype.kind in "iu" and ids.size > 0
        is_valid = is_valid and int(ids.min()) >= 0 and int(ids.max()) < self._vocab_size
        is_valid = is_valid and all(
            t < self._vocab_size for t in message.sampling_params.logit_bias
        )
        tokens = ids.astype(np.int32) if is_valid else np.empty(0, np.int32)
        blocks = [] if self._names is None else self._names.extend("", tokens)
        if message.uid not in self._open:
            whole = 0 if self._names is None else len(blocks) * self._names.block_size
            self._open[message.uid] = _Open(blocks[-1] if blocks else "", tokens[whole:])
        return Arrival(
            tick=self.tick,
            time_s=self._now_s(),
            uid=message.uid,
            prompt_len=int(ids.size),
            blocks=blocks,
            params=plain_params(message.sampling_params, has_secrets=self._has_prompts),
            priority=message.priority,
            is_invalid=not is_valid,
            token_ids=tokens.tolist() if self._has_prompts else None,
        )

    def _now_s(self) -> float:
        return round(time.monotonic() - self._started_s, 6)


def parts_of(batch: Batch) -> list[Part]:
    """Return what a batch computes of each request."""
    host = batch.host
    assert host is not None, "the scheduler sets batch.host"
    flags = batch.is_sampled if batch.is_prefill else [True] * batch.size
    rows = zip(batch.reqs, host.cached_lens.tolist(), host.seq_lens.tolist(), flags, strict=True)
    return [
        Part(req.uid, cached_len, seq_len, is_sampled, _num_retractions(req))
        for req, cached_len, seq_len, is_sampled in rows
    ]


class _TappedIO(SchedulerIO):
    """A line whose messages are noted; each look for messages is a tick."""

    def __init__(self, inner: SchedulerIO, tap: Tap) -> None:
        self._inner = inner
        self._tap = tap

    def receive(self, block: bool) -> list[SchedulerMsg]:
        """Receive; see `SchedulerIO.receive`."""
        self._tap.tick += 1
        messages = self._inner.receive(block)
        self._tap.received(messages)
        return messages

    def send(self, replies: list[ReplyMsg]) -> None:
        """Send; see `SchedulerIO.send`."""
        self._inner.send(replies)
        self._tap.sent(replies)


class _TappedEngine(StepEngine):
    """An engine whose steps are noted once they run, so that writing costs the device nothing."""

    def __init__(self, inner: StepEngine, tap: Tap) -> None:
        self.limits = inner.limits
        self.backends = inner.backends
        self.picked = inner.picked
        self._inner = inner
        self._tap = tap

    def forward_batch(self, batch: Batch) -> ForwardOutput:
        """Launch a step; see `StepEngine.forward_batch`."""
        try:
            output = self._inner.forward_batch(batch)
        except Exception as error:
            self._tap.launched(batch, error)
            raise
        self._tap.launched(batch)
        return _TappedOutput(output, self._tap)


class _TappedOutput(ForwardOutput):
    """A launched step whose failure is noted."""

    def __init__(self, inner: ForwardOutput, tap: Tap) -> None:
        self._inner = inner
        self._tap = tap

    def wait(self) -> StepResult:
        """Wait; see `ForwardOutput.wait`."""
        try:
            return self._inner.wait()
        except Exception as error:
            self._tap.failed(error)
            raise


def _num_retractions(req: Req) -> int:
    return cast("ScheduledReq", req).num_retractions


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
