"""Launching planned steps, and turning their results into tokens and terminal results."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from minisgl.engine.contract import ForwardOutput, PromptScores, StepEngine, StepResult
from minisgl.errors import ProcessorError
from minisgl.plugin.records import StepRecord
from minisgl.scheduler.cache_manager import CacheManager, PageUpdates
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.contract import ScheduledReq
from minisgl.scheduler.decode import DecodeManager
from minisgl.scheduler.lifecycle import Lifecycle, describe
from minisgl.scheduler.outbox import Outbox
from minisgl.scheduler.prefill import PrefillManager
from minisgl.scheduler.step_plan import StepPlan

logger = logging.getLogger(__name__)

_MAX_FAILED_STEPS = 3  # in a row; then it is not the requests' fault


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that the engine has been given.

    Attributes:
        number: Steps are numbered from 1 in launch order.
        reqs: Requests of the batch.
        sampled: Those that get a token, in the order of the result.
        output: The engine's side of it.
        record: For the observer, if there is one: all of it but the time, which is that of the
            launch.
    """

    number: int
    reqs: list[ScheduledReq]
    sampled: list[ScheduledReq]
    output: ForwardOutput
    record: StepRecord | None


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """The neighbours of a `StepRunner`; ``on_step`` observes settled steps."""

    engine: StepEngine
    config: SchedulerConfig
    prefill: PrefillManager
    decode: DecodeManager
    cache: CacheManager
    lifecycle: Lifecycle
    outbox: Outbox
    on_step: Callable[[StepRecord], None] | None = None


class StepRunner:
    """Launches steps and settles them in the same order, at most one being in flight.

    A step is *settled* when the engine has run it and its tokens are in the books.
    """

    def __init__(self, parts: RunnerParts) -> None:
        """Start with nothing in flight."""
        self.num_launched = 0
        self.num_prefill_steps = 0
        self.num_prefill_tokens = 0
        self.num_output_tokens = 0
        self.num_discarded_tokens = 0
        self._parts = parts
        self._in_flight: LaunchedStep | None = None
        self._num_failed_steps = 0
        self._num_cached_tokens = 0  # that observers have been told about

    @property
    def is_in_flight(self) -> bool:
        """Whether a launched step has not been settled."""
        return self._in_flight is not None

    def run(self, plan: StepPlan | None) -> None:
        """Launch a step and settle the one before it; without overlap settle both."""
        launched = None if plan is None else self._launch(plan)
        previous, self._in_flight = self._in_flight, launched
        if previous is not None:
            self._wait_for(previous)
        if not self._parts.config.is_overlap:
            self.drain()

    def drain(self) -> None:
        """Settle what is in flight, so that no launched step holds a request."""
        step, self._in_flight = self._in_flight, None
        if step is not None:
            self._wait_for(step)

    def abandon(self) -> None:
        """Wait until the engine is done with the step in flight, whatever becomes of it."""
        step, self._in_flight = self._in_flight, None
        if step is None:
            return
        try:
            step.output.wait()
        except Exception:
            logger.exception("the abandoned step %s failed", step.number)

    def _launch(self, plan: StepPlan) -> LaunchedStep | None:
        """Give a step to the engine; if that fails, find out which requests are to blame."""
        record = None if self._parts.on_step is None else self._record(plan)
        try:
            output = self._parts.engine.forward_batch(plan.batch())
        except Exception as error:
            if not self._parts.config.is_isolating:
                raise
            logger.exception("a %s step of %s requests failed", plan.phase, len(plan.reqs))
            self._run_singly(plan, error)
            return None
        return self._account(plan, output, record)

    def _run_singly(self, plan: StepPlan, error: Exception) -> None:
        """Run each request of a step that could not be launched on its own, at once.

        The engine writes only KV and tokens that it would write again, so a second attempt does
        no harm.
        """
        parts, arrays = self._parts, plan.arrays
        parts.cache.put_back_updates(
            PageUpdates(arrays.page_rows, arrays.page_cols, arrays.page_ids)
        )
        self.drain()
        has_run = False
        for index, req in enumerate(plan.reqs):
            if req.is_finished:
                continue
            single = plan.only(index)
            try:
                output = parts.engine.forward_batch(single.batch())
            except Exception as single_error:
                logger.exception("the step of request %s alone failed too", req.uid)
                error = single_error
                parts.lifecycle.fail(req, error)
                continue
            if not has_run:
                parts.cache.take_updates()  # this step has brought them to the engine
                has_run = True
            self._wait_for(self._account(single, output, None))
        if not has_run:
            self._count_failure(error)

    def _account(
        self, plan: StepPlan, output: ForwardOutput, record: StepRecord | None
    ) -> LaunchedStep:
        """Bring the books up to date with a step that was launched."""
        self.num_launched += 1
        if plan.phase == "prefill":
            self._account_prefill(plan)
        else:
            self._parts.decode.advance(plan.reqs, self.num_launched)
        return LaunchedStep(self.num_launched, plan.reqs, plan.sampled, output, record)

    def _account_prefill(self, plan: StepPlan) -> None:
        """Let complete prompts decode, remember the cut one, and share what was computed."""
        parts, step = self._parts, self.num_launched
        self.num_prefill_steps += 1
        for req, is_sampled in zip(plan.reqs, plan.is_sampled, strict=True):
            req.last_step = step
            self.num_prefill_tokens += req.extend_len
            if is_sampled:
                if parts.prefill.partial is req:
                    parts.prefill.partial = None
                req.complete_one()
                parts.decode.add(req)
            else:
                parts.prefill.partial = req
                req.cached_len = req.device_len
                req.device_len = req.num_tokens
            parts.cache.share(req, step)

    def _wait_for(self, step: LaunchedStep) -> None:
        """Settle a step, or fail all that run when it fails on its way."""
        try:
            result = step.output.wait()
        except Exception as error:
            if not self._parts.config.is_isolating:
                raise
            logger.exception("step %s failed on its way", step.number)
            self.abandon()
            self._parts.lifecycle.end_running(self.num_launched, "error", describe(error))
            self._count_failure(error)
            return
        self._num_failed_steps = 0
        self._settle(step, result)
        if step.record is not None and self._parts.on_step is not None:
            duration_s = time.perf_counter() - step.record.duration_s
            self._parts.on_step(replace(step.record, duration_s=duration_s))

    def _settle(self, step: LaunchedStep, result: StepResult) -> None:
        """Record the tokens of a step that has run."""
        outbox, lifecycle = self._parts.outbox, self._parts.lifecycle
        lifecycle.settle(step.number)
        uids, token_ids, logprobs = outbox.uids, outbox.token_ids, result.logprobs
        for scores in result.scores:
            self._settle_scores(step.reqs[scores.index], scores)
        num_before = len(uids)
        tokens = result.token_ids.tolist()
        for index, (req, token) in enumerate(zip(step.sampled, tokens, strict=True)):
            if req.is_finished:
                continue  # it ended while this step was in flight: one token too many
            if req.sampling_params.max_tokens == 0:
                lifecycle.finish(req, "length")
                continue
            if logprobs and index in logprobs:
                outbox.logprobs[len(uids)] = logprobs[index]
            num_tokens = req.num_tokens
            req.tokens[num_tokens] = token
            req.num_tokens = num_tokens = num_tokens + 1
            uids.append(req.uid)
            token_ids.append(token)
            if token in req.stop_ids:
                lifecycle.finish(req, "stop", stop_token_id=token)
            elif num_tokens == req.max_device_len:
                lifecycle.finish(req, "length")
        num_sent = len(uids) - num_before
        self.num_output_tokens += num_sent
        self.num_discarded_tokens += len(tokens) - num_sent

    def _settle_scores(self, req: ScheduledReq, scores: PromptScores) -> None:
        """Send what is new of the log-probabilities: some may have been computed twice."""
        if req.is_finished:
            return
        assert scores.start <= req.num_scored, f"{req}: prompt tokens were left out"
        new = scores.logprobs[req.num_scored - scores.start :]
        req.num_scored += len(new)
        if new:
            self._parts.outbox.prompt_logprobs.setdefault(req.uid, []).extend(new)

    def _record(self, plan: StepPlan) -> StepRecord:
        """Describe a step that is about to be launched; its duration is the time of the launch."""
        num_cached_tokens = self._parts.prefill.num_cached_tokens
        num_new, self._num_cached_tokens = (
            num_cached_tokens - self._num_cached_tokens,
            num_cached_tokens,
        )
        num_tokens = int((plan.arrays.seq_lens - plan.arrays.cached_lens).sum())
        return StepRecord(plan.phase, len(plan.reqs), num_tokens, num_new, time.perf_counter())

    def _count_failure(self, error: Exception) -> None:
        """Give up when it is clearly not the fault of single requests.

        A logits processor may fail with any number of them, and the engine is as good as before.
        """
        if isinstance(error, ProcessorError):
            return
        self._num_failed_steps += 1
        if self._num_failed_steps >= _MAX_FAILED_STEPS:
            raise error
