"""The API server's line to the worker processes; lives on one event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

import zmq

from minisgl.errors import CapacityError, RequestError
from minisgl.message.queues import PullQueue, PushQueue
from minisgl.message.text import (
    ChatPrompt,
    CountMsg,
    DecodedReply,
    DecodeMsg,
    FinishedText,
    LimitsMsg,
    RefusedMsg,
    TextMsg,
    TokenizeMsg,
    TokensReply,
)
from minisgl.message.types import (
    AbortMsg,
    ExitMsg,
    FlushMsg,
    FlushReply,
    SchedulerStats,
    StatsMsg,
    StatsReply,
)
from minisgl.message.wire import wire_codec
from minisgl.sampling_params import SamplingParams
from minisgl.workers.contract import Endpoints
from minisgl_server.call import Call, Piece
from minisgl_server.metrics import Metrics

logger = logging.getLogger(__name__)

Prompt = str | list[int] | ChatPrompt


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the engine said when it was ready.

    Attributes:
        model: Name of the model.
        device: Where it runs.
        max_seq_len: Tokens of prompt and output together.
        max_running_reqs: Sequences that run at once.
        vocab_size: Token ids are below this.
        num_pages: KV pages.
        page_size: Tokens of a page.
        max_open_reqs: Sequences that may run and wait together, or ``None`` for no limit.
    """

    model: str
    device: str
    max_seq_len: int
    max_running_reqs: int
    vocab_size: int
    num_pages: int
    page_size: int
    max_open_reqs: int | None = None


@dataclass(frozen=True, slots=True)
class Submission:
    """What is to be generated.

    Attributes:
        prompts: At least one.
        params: For all of them; ``n`` sequences are made of each.
        priority: Larger is more urgent.
        deadline_s: Seconds until it is aborted, or ``None``.
        add_special_tokens: Whether texts get their BOS.
    """

    prompts: Sequence[Prompt]
    params: SamplingParams
    priority: int = 0
    deadline_s: float | None = None
    add_special_tokens: bool = True


@dataclass(slots=True)
class _Sequence:
    """An open sequence; changed by the client alone."""

    call: Call
    index: int
    tokenizer: PushQueue
    last_s: float = 0.0  # when its newest token came; 0 before the first


class EngineClient:
    """Submits requests and hands out what comes back.

    Every request that was submitted gets its terminal result, also when the workers die: whoever
    watches them calls `fail`.
    """

    def __init__(self, endpoints: Endpoints, metrics: Metrics) -> None:
        """Bind and connect; workers need not run yet.

        Args:
            endpoints: Where everyone listens.
            metrics: Told about tokens and ends.
        """
        codec = wire_codec()
        self._context: zmq.Context[Any] = zmq.Context()  # Any: its sockets are of a private type
        self._inbox = PullQueue(self._context, endpoints.server, codec)
        self._scheduler = PushQueue(self._context, endpoints.scheduler, codec)
        self._detokenizer = PushQueue(self._context, endpoints.detokenizer, codec)
        self._tokenizers = (
            [PushQueue(self._context, path, codec) for path in endpoints.tokenizers]
            if endpoints.num_tokenizers
            else [self._detokenizer]
        )
        self._metrics = metrics
        self._max_open: int | None = None
        self._uids = count(1)
        self._open: dict[int, _Sequence] = {}
        self._questions: dict[int, asyncio.Future[Any]] = {}  # Any: each has its own answer
        self._stats_waiters: deque[asyncio.Future[SchedulerStats]] = deque()
        self._flush_waiters: deque[asyncio.Future[FlushReply]] = deque()
        self.failure: str | None = None

    @property
    def num_open(self) -> int:
        """Sequences without a terminal result."""
        return len(self._open)

    def attach(self, facts: EngineFacts) -> None:
        """Begin to receive, on the running loop, and tell tokenizers what the engine can take."""
        self._max_open = facts.max_open_reqs
        limits = LimitsMsg(facts.max_seq_len, facts.vocab_size)
        for tokenizer in self._tokenizers:
            tokenizer.send([limits])
        loop = asyncio.get_running_loop()
        loop.add_reader(self._inbox.file_descriptor, self._receive)
        loop.call_soon(self._receive)  # what came earlier no longer makes the descriptor ready

    def submit(self, submission: Submission) -> Call:
        """Hand a request to the workers.

        Raises:
            RequestError: It has more sequences than may ever run and wait together.
            CapacityError: Too many wait already, or the engine is gone.
        """
        num_choices = submission.params.n
        num_new = len(submission.prompts) * num_choices
        self._check_size(len(submission.prompts), num_choices)
        self._check_capacity(num_new)
        now_s = time.monotonic()
        uids = [next(self._uids) for _ in range(num_new)]
        call = Call(uids, now_s, self.abort)
        for number, prompt in enumerate(submission.prompts):
            mine = uids[number * num_choices : (number + 1) * num_choices]
            tokenizer = self._tokenizers[mine[0] % len(self._tokenizers)]
            for offset, uid in enumerate(mine):
                self._open[uid] = _Sequence(call, number * num_choices + offset, tokenizer)
            message = TokenizeMsg(
                mine,
                prompt,
                submission.params,
                submission.priority,
                submission.deadline_s,
                submission.add_special_tokens,
            )
            tokenizer.send([message])
        return call

    async def count(
        self, prompt: Prompt, add_special_tokens: bool = True, must_fit: bool = False
    ) -> TokensReply:
        """Tokenize a prompt.

        Raises:
            RequestError: It cannot be tokenized, or is too long and ``must_fit``.
            CapacityError: The engine is gone.
        """
        uid = next(self._uids)
        reply = await self._ask(uid, CountMsg(uid, prompt, add_special_tokens, must_fit))
        assert isinstance(reply, TokensReply), "the tokenizer answers what it is asked"
        return reply

    async def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        """Turn token ids into text.

        Raises:
            RequestError: There is no such token.
            CapacityError: The engine is gone.
        """
        uid = next(self._uids)
        reply = await self._ask(uid, DecodeMsg(uid, token_ids, skip_special_tokens))
        assert isinstance(reply, DecodedReply), "the tokenizer answers what it is asked"
        return reply.text

    async def stats(self) -> SchedulerStats:
        """Return the scheduler's gauges and counters; waits for the step that runs.

        Raises:
            CapacityError: The engine is gone.
        """
        self._check_alive()
        waiter: asyncio.Future[SchedulerStats] = asyncio.get_running_loop().create_future()
        if not self._stats_waiters:  # else an answer is on its way
            self._scheduler.send([StatsMsg()])
        self._stats_waiters.append(waiter)
        return await waiter

    async def flush(self) -> FlushReply:
        """Forget every cached prefix that no running request uses.

        Raises:
            CapacityError: The engine is gone.
        """
        self._check_alive()
        waiter: asyncio.Future[FlushReply] = asyncio.get_running_loop().create_future()
        self._flush_waiters.append(waiter)
        self._scheduler.send([FlushMsg()])
        return await waiter

    def fail(self, detail: str) -> None:
        """The workers are gone: end everything that is open with an error."""
        self.failure = detail
        self._end_all("error", detail)
        waiters = [*self._questions.values(), *self._stats_waiters, *self._flush_waiters]
        self._questions.clear()
        self._stats_waiters.clear()
        self._flush_waiters.clear()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(CapacityError(detail))

    def cut_off(self, detail: str) -> None:
        """End everything that is open, without a word to the workers: they end next."""
        self._end_all("abort", detail)

    def send_exit(self) -> None:
        """Tell every worker to end."""
        self._scheduler.send([ExitMsg()])
        for queue in {*self._tokenizers, self._detokenizer}:
            queue.send([ExitMsg()])

    def close(self) -> None:
        """Close the queues."""
        self._inbox.close()
        for queue in (self._scheduler, self._detokenizer, *self._tokenizers):
            queue.close()
        self._context.term()

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise CapacityError(self.failure)

    def _check_size(self, num_prompts: int, num_choices: int) -> None:
        """Refuse what a later try would not fit either."""
        if self._max_open is None or num_prompts * num_choices <= self._max_open:
            return
        limit = (
            f"at most {self._max_open} may run and wait together (--max-running-requests and "
            "--max-queued-requests)"
        )
        if num_choices > self._max_open or num_prompts == 1:
            raise RequestError(f"n {num_choices}: are too many sequences; {limit}")
        raise RequestError(
            f"prompt: {num_prompts} prompts with n {num_choices} are {num_prompts * num_choices} "
            f"sequences; {limit}"
        )

    def _check_capacity(self, num_new: int) -> None:
        self._check_alive()
        if self._max_open is not None and len(self._open) + num_new > self._max_open:
            raise CapacityError(
                f"the queue is full: {len(self._open)} sequences run or wait, at most "
                f"{self._max_open} may; try again later"
            )

    async def _ask(self, uid: int, message: object) -> object:
        self._check_alive()
        waiter: asyncio.Future[Any] = asyncio.get_running_loop().create_future()  # Any: as above
        self._questions[uid] = waiter
        self._tokenizers[uid % len(self._tokenizers)].send([message])
        try:
            return await waiter
        finally:
            self._questions.pop(uid, None)

    def abort(self, call: Call, reason: str) -> bool:
        """Stop what a call still has open; goes the way of its prompt, so does not overtake it.

        Returns:
            Whether there was something to stop that nobody had stopped before.
        """
        if call.is_aborted or call.is_ended:
            return False
        call.is_aborted = True
        for uid in call.uids:
            sequence = self._open.get(uid)
            if sequence is not None:
                sequence.tokenizer.send([AbortMsg(uid, reason)])
        return True

    def _receive(self) -> None:
        for message in self._inbox.receive(block=False):
            match message:
                case TextMsg():
                    self._dispatch(message)
                case RefusedMsg():
                    self._refuse(message)
                case TokensReply() | DecodedReply():
                    self._answer(message.uid, message)
                case StatsReply():
                    self._answer_all(self._stats_waiters, message.stats)
                case FlushReply():
                    if self._flush_waiters:
                        _resolve(self._flush_waiters.popleft(), message)
                case _:
                    logger.error("the server takes no %s", type(message).__name__)

    def _dispatch(self, message: TextMsg) -> None:
        now_s = time.monotonic()
        for uid, logprobs in message.prompt_logprobs.items():
            sequence = self._open.get(uid)
            if sequence is not None:
                sequence.call.put(Piece(sequence.index, prompt_logprobs=logprobs))
        for i, (uid, text) in enumerate(zip(message.uids, message.texts, strict=True)):
            sequence = self._open.get(uid)
            if sequence is None:
                continue
            if message.token_ids[i] >= 0:
                self._metrics.on_token(
                    now_s - (sequence.last_s or sequence.call.start_s), is_first=not sequence.last_s
                )
                sequence.last_s = now_s
            logprob = message.logprobs.get(i)
            if text or logprob is not None:
                sequence.call.put(Piece(sequence.index, text, logprob))
        for finished in message.finished:
            self._finish(finished)

    def _end_all(self, reason: Literal["abort", "error"], detail: str) -> None:
        for uid in list(self._open):
            self._finish(FinishedText(uid, reason, detail))

    def _finish(self, finished: FinishedText) -> None:
        sequence = self._open.pop(finished.uid, None)
        if sequence is not None:
            self._metrics.on_end(finished, time.monotonic() - sequence.call.start_s)
            sequence.call.put(Piece(sequence.index, end=finished))

    def _refuse(self, message: RefusedMsg) -> None:
        for uid in message.uids:
            waiter = self._questions.get(uid)
            if waiter is not None and not waiter.done():
                waiter.set_exception(RequestError(message.detail))
            self._finish(FinishedText(uid, "error", message.detail, refusal="invalid"))

    def _answer(self, uid: int, reply: object) -> None:
        waiter = self._questions.get(uid)
        if waiter is not None:
            _resolve(waiter, reply)

    def _answer_all(
        self, waiters: deque[asyncio.Future[SchedulerStats]], stats: SchedulerStats
    ) -> None:
        while waiters:
            _resolve(waiters.popleft(), stats)


def _resolve(waiter: asyncio.Future[Any], result: object) -> None:  # Any: each has its own answer
    if not waiter.done():
        waiter.set_result(result)
