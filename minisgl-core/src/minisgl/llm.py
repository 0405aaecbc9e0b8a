"""The offline interface: an engine, its scheduler and a tokenizer in one object.

with LLM("demo") as llm:
print(llm.generate(["The capital of France is"])[0]["text"])
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from types import TracebackType
from typing import Any

import numpy as np
from tqdm import tqdm

from minisgl.completion import Chunk, Completion
from minisgl.config.load import Settings
from minisgl.engine.build import EngineRequest, describe_to_probes
from minisgl.errors import RequestError, WorkerError
from minisgl.generation import Generation
from minisgl.message.types import (
    AbortMsg,
    FinishedReq,
    FinishReason,
    ResultMsg,
    SchedulerStats,
    UserMsg,
)
from minisgl.parallel.build import build_ranks, check_first_node
from minisgl.parallel.ranks import RankRequest
from minisgl.plugin.hooks import request_observer, step_observer
from minisgl.plugin.manager import PluginManager
from minisgl.prompts import Prompt, as_batch, encode_prompt, per_prompt
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.build import SchedulerBackends
from minisgl.scheduler.io import DeadlineIO, ObservedIO, OfflineIO, SchedulerIO
from minisgl.scheduler.recorder import Recorder
from minisgl.tokenizer.chat import ChatOptions, Message, encode_chat
from minisgl.tokenizer.eos import eos_token_ids
from minisgl.tokenizer.pieces import TokenPieces
from minisgl.weights.resolve import open_configured

logger = logging.getLogger(__name__)


class LLM:
    """Generates text, in this process or, with ``tp=N``, in this one and N - 1 others.

    Calls may come from several threads, one of which computes at a time. An exception, Ctrl-C
    included, ends the requests of the call that it left. Where it left a step half done, the
    requests of other calls end with it, with the reason ``abort``, and cached prefixes are lost.
    """

    def __init__(self, model: str, **settings: Any) -> None:  # Any: settings of every type
        """Load a model.

        Args:
            model: Folder, .gguf file, hub id, or ``"demo"``.
            **settings: Any setting of ``minisgl generate --help`` by its name, such as
                ``dtype=torch.float32``, ``attn="fa,fi"``, ``max_running_req=8``,
                ``num_page_override=2048`` or ``fa={"num_splits": 4}``.

        Raises:
            SettingsError: A setting is unknown or has a value that is not allowed.
            PluginError: A backend cannot be had.
            ModelError: The model cannot be found, read or run.
            WorkerError: One of several ranks died. When that happens later, it ends all requests,
                and every call raises it.
        """
        manager = PluginManager.bootstrap()
        self._open_model(manager.load_settings({"model": model, **settings}), manager)

    @classmethod
    def from_settings(cls, settings: Settings, manager: PluginManager) -> LLM:
        """Load a model with settings that are filled already; see `LLM` for the errors."""
        llm = cls.__new__(cls)
        llm._open_model(settings, manager)
        return llm

    def _open_model(self, settings: Settings, manager: PluginManager) -> None:
        """Set everything up."""
        check_first_node(settings)
        recorder = Recorder.of(settings)
        files = open_configured(settings, manager)
        self.tokenizer = files.load_tokenizer()
        self._pieces = TokenPieces(self.tokenizer)
        self._io = OfflineIO()
        engine = EngineRequest(
            settings,
            manager,
            files,
            eos_token_ids=eos_token_ids(files, self.tokenizer),
            show_progress=sys.stderr.isatty(),
        )
        self._ranks = build_ranks(
            RankRequest(
                engine=engine,
                backends=SchedulerBackends.resolve(manager, settings, describe_to_probes(engine)),
                line=self._io,
                around=partial(_observed, manager),
                on_step=step_observer(manager.hooks),
                recorder=recorder,
            )
        )
        self._lock = self._ranks.lock
        self._open: dict[int, Generation] = {}
        self._uids = count()
        self._is_in_step = False
        self._is_torn = False  # a step was left half done
        self._is_shut_down = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool | None = None,
    ) -> list[Completion]:
        """Complete prompts, batched.

        Args:
            prompts: One prompt or many.
            sampling_params: For all of them, or one per prompt; greedy by default.
            show_progress: Show a bar on stderr; by default with several prompts on a terminal.

        Returns:
            One completion per prompt, in order.

        Raises:
            RequestError: A prompt is empty, too long, no UTF-8 text or not of this vocabulary,
                `sampling_params` are none or have a token of another vocabulary, or the lists
                have different lengths. Nothing was generated.
        """
        batch = as_batch(prompts)
        params = per_prompt(sampling_params, len(batch))
        for each in params:
            each.check_vocabulary(self._ranks.limits.vocab_size)
        encoded = [self._encode(prompt, f"prompts[{i}]") for i, prompt in enumerate(batch)]
        if show_progress is None:
            show_progress = len(batch) > 1 and sys.stderr.isatty()
        groups: list[list[Generation]] = []
        try:
            for ids, each in zip(encoded, params, strict=True):
                groups.append([])
                self._submit(ids, each, groups[-1])
            with tqdm(total=len(groups), desc="generating", disable=not show_progress) as bar:
                for group in groups:
                    while not all(g.is_ended for g in group):
                        self._step()
                    bar.update()
        except BaseException:
            self._abandon([g for group in groups for g in group])
            raise
        self._settle()
        return [_completion(group) for group in groups]

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        options: ChatOptions | None = None,
    ) -> Completion:
        """Answer a conversation.

        Args:
            messages: Mappings with ``role`` and ``content``.
            sampling_params: How to sample; greedy by default.
            options: How to render the chat template.

        Raises:
            RequestError: The template refuses the messages, or they are too long.
        """
        return self.generate([self.encode_chat(messages, options)], sampling_params)[0]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[Chunk]:
        """Complete one prompt piece by piece; closing the iterator aborts the request.

        Args:
            prompt: Text or token ids; for a chat, what `encode_chat` returns.
            sampling_params: How to sample; ``n`` must be 1.

        Raises:
            RequestError: As for `generate`; at the call, before anything is generated.
        """
        (params,) = per_prompt(sampling_params, 1)
        if params.n != 1:
            raise RequestError(f"n {params.n}: must be 1 for a stream")
        params.check_vocabulary(self._ranks.limits.vocab_size)
        chunks = self._chunks(self._encode(prompt, "prompt"), params)
        next(chunks)  # it has begun, so closing it reaches its end, where the request is ended too
        return chunks

    def encode_chat(
        self, messages: Sequence[Message], options: ChatOptions | None = None
    ) -> list[int]:
        """Return the prompt's token ids for a conversation; see `chat`."""
        return encode_chat(self.tokenizer, messages, options)

    def stats(self) -> SchedulerStats:
        """Return the scheduler's gauges and counters; these begin anew after a broken step."""
        with self._lock:
            self._mend()
            return self._ranks.stats()

    def check_integrity(self) -> None:
        """Compare all books of the scheduler.

        Raises:
            AssertionError: A page or a row is lost or has two owners.
        """
        with self._lock:
            self._mend()
            self._ranks.check_integrity()

    def shutdown(self) -> None:
        """End what is running and let go of the engine; safe to call twice."""
        with self._lock:
            if not self._is_shut_down:
                self._mend()
                self._ranks.shutdown()
                self._dispatch()
                self._is_shut_down = True

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _encode(self, prompt: Prompt, where: str) -> np.ndarray:
        """Return a prompt's ids, or refuse it before anything runs."""
        return encode_prompt(self.tokenizer, self._ranks.limits, prompt, where)

    def _submit(self, ids: np.ndarray, params: SamplingParams, group: list[Generation]) -> None:
        """Hand a prompt to the scheduler, once per choice.

        ``group`` gets each generation before anyone else does, so that a caller who is interrupted
        can end it.
        """
        with self._lock:
            if self._is_shut_down:
                raise RequestError("this LLM was shut down; make a new one")
            self._check_alive()
            for index in range(params.n):
                each = params
                if index and params.seed is not None:
                    each = replace(params, seed=(params.seed + index) % 2**64)
                uid = next(self._uids)
                generation = Generation(uid, len(ids), each, self._pieces)
                group.append(generation)
                self._open[uid] = generation
                self._io.put([UserMsg(uid, ids, each)])

    def _step(self) -> None:
        """Let the scheduler do one step and hand out what it sent."""
        with self._lock:
            self._check_alive()
            self._is_in_step = self._is_torn = True  # torn, unless it gets to its end
            try:
                self._ranks.step()
                self._dispatch()
                self._is_torn = False
            finally:
                self._is_in_step = False

    def _mend(self) -> None:
        """End every request if a step was left half done, or if there can't be another one."""
        failure = self._ranks.failure
        if self._is_in_step or not (self._is_torn or failure):
            return  # in the midst of a step an observer may call
        if not failure:
            try:
                self._ranks.restart()
            except WorkerError as error:
                failure = str(error)
        reason: FinishReason = "error" if failure else "abort"
        for uid in list(self._open):
            self._open[uid].finish(FinishedReq(uid, reason, failure or "a step was interrupted"))
        self._open.clear()
        self._is_torn = False

    def _check_alive(self) -> None:
        """Mend, and refuse to go on where that is in vain."""
        self._mend()
        if self._ranks.failure:
            raise WorkerError(f"{self._ranks.failure}; make a new LLM")

    def _settle(self) -> None:
        """When nobody waits, let the step that was launched ahead end, so that all pages return."""
        while self._io.has_messages or (not self._open and self._ranks.has_work):
            self._step()

    def _dispatch(self) -> None:
        """Give tokens and results to their generations; stop those that found a stop string."""
        for reply in self._io.take():
            if isinstance(reply, ResultMsg):
                self._dispatch_result(reply)

    def _dispatch_result(self, result: ResultMsg) -> None:
        silent: dict[int, int] = {}  # uid to index of the token that ended it
        if result.finished:
            stopped = {f.uid for f in result.finished if f.stop_token_id is not None}
            silent = {uid: i for i, uid in enumerate(result.uids) if uid in stopped}
        for uid, logprobs in result.prompt_logprobs.items():
            if uid in self._open:
                self._open[uid].add_prompt(logprobs)
        for i, (uid, token_id) in enumerate(zip(result.uids, result.token_ids, strict=True)):
            generation = self._open.get(uid)
            if generation is None or generation.is_finished:
                continue
            generation.add(token_id, result.logprobs.get(i), silent.get(uid) != i)
            if generation.is_finished:
                self._io.put([AbortMsg(uid, "a stop string was found")])
        for finished in result.finished:
            generation = self._open.pop(finished.uid, None)
            if generation is not None:
                generation.finish(finished)

    def _chunks(self, ids: np.ndarray, params: SamplingParams) -> Iterator[Chunk]:
        """Submit a prompt and yield an empty chunk; then what is new after each step."""
        num_chars = num_tokens = 0
        group: list[Generation] = []
        try:
            self._submit(ids, params, group)
            yield Chunk(text="", token_ids=[], finish_reason=None)
            (generation,) = group
            while not generation.is_ended:
                # Another caller's step may have brought something, or even the end.
                if num_chars == len(generation.text):
                    self._step()
                if num_chars < len(generation.text) and not generation.is_ended:
                    text, tokens = generation.text[num_chars:], generation.token_ids[num_tokens:]
                    num_chars, num_tokens = len(generation.text), len(generation.token_ids)
                    yield Chunk(text=text, token_ids=tokens, finish_reason=None)
        finally:
            self._abandon(group)
        choice = generation.choice()
        yield Chunk(
            text=generation.text[num_chars:],
            token_ids=generation.token_ids[num_tokens:],
            finish_reason=choice["finish_reason"],
            error=choice["error"],
            usage=Generation.usage([generation]),
        )

    def _abandon(self, generations: Sequence[Generation]) -> None:
        """End those requests that are still open: their caller has left."""
        with self._lock:
            self._mend()
            left = [g for g in generations if not g.is_ended]
            self._io.put([AbortMsg(g.uid, "the caller left") for g in left])
            if self._is_in_step or self._ranks.failure:
                return  # a stream that the garbage collector closes; the next step will see to it
            try:
                if left:
                    self._step()
                for generation in left:  # some may not have reached the scheduler
                    if self._open.pop(generation.uid, None) is not None:
                        generation.finish(FinishedReq(generation.uid, "abort", "the caller left"))
                self._settle()
            except Exception:
                logger.exception("a step failed while requests were being aborted")
                self._mend()


def _observed(manager: PluginManager, line: OfflineIO) -> SchedulerIO:
    """Put whoever observes requests around the line."""
    io: SchedulerIO = DeadlineIO(line)
    on_request = request_observer(manager.hooks)
    return io if on_request is None else ObservedIO(io, on_request)


def _completion(group: Sequence[Generation]) -> Completion:
    """Put the choices of one prompt together."""
    choices = [generation.choice() for generation in group]
    return Completion(**choices[0], usage=Generation.usage(group), choices=choices)
