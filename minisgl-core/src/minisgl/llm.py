"""The offline interface: an engine, its scheduler and a tokenizer in one object.

with LLM("demo") as llm:
print(llm.generate(["The capital of France is"])[0]["text"])
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from types import TracebackType
from typing import Any

import numpy as np
from tqdm import tqdm

from minisgl.completion import Chunk, Completion
from minisgl.config.load import Settings
from minisgl.engine.build import EngineRequest, build_engine
from minisgl.errors import RequestError, SettingsError
from minisgl.generation import Generation
from minisgl.message.types import AbortMsg, ResultMsg, SchedulerStats, UserMsg
from minisgl.plugin.hooks import request_observer, step_observer
from minisgl.plugin.manager import PluginManager
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.build import SchedulerBackends, build_scheduler
from minisgl.scheduler.io import DeadlineIO, ObservedIO, OfflineIO, SchedulerIO
from minisgl.tokenizer.chat import ChatOptions, Message, encode_chat
from minisgl.tokenizer.encode import encode_text
from minisgl.tokenizer.eos import eos_token_ids
from minisgl.tokenizer.pieces import TokenPieces
from minisgl.weights.resolve import open_model

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]
"""A text, or token ids."""


class LLM:
    """Generates text in this process.

    Calls may come from several threads, one of which computes at a time. An exception, Ctrl-C
    included, ends the requests of the call that it left and no others.
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
        if settings.engine.tp != 1:
            raise SettingsError(
                f"tp {settings.engine.tp}: the offline LLM runs on one rank; allowed: 1"
            )
        backends = SchedulerBackends.resolve(manager, settings)
        files = open_model(
            settings.model.model,
            settings.model.model_source,
            manager,
            revision=settings.model.revision,
            settings_of=settings.plugin,
        )
        self.tokenizer = files.load_tokenizer()
        self._pieces = TokenPieces(self.tokenizer)
        self._engine = build_engine(
            EngineRequest(
                settings,
                manager,
                files,
                eos_token_ids=eos_token_ids(files, self.tokenizer),
                show_progress=sys.stderr.isatty(),
            )
        )
        self._io = OfflineIO()
        io: SchedulerIO = DeadlineIO(self._io)
        on_request = request_observer(manager.hooks)
        if on_request is not None:
            io = ObservedIO(io, on_request)
        on_step = step_observer(manager.hooks)
        self._scheduler = build_scheduler(backends, settings, self._engine, io, on_step)
        self._open: dict[int, Generation] = {}
        self._uids = count()
        self._lock = threading.RLock()
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
            RequestError: A prompt is empty, too long, or not of this vocabulary, or the lists
                have different lengths. Nothing was generated.
        """
        batch = _as_batch(prompts)
        params = _per_prompt(sampling_params, len(batch))
        encoded = [self._encode(prompt, f"prompts[{i}]") for i, prompt in enumerate(batch)]
        if show_progress is None:
            show_progress = len(batch) > 1 and sys.stderr.isatty()
        groups: list[list[Generation]] = []
        try:
            for ids, each in zip(encoded, params, strict=True):
                groups.append(self._submit(ids, each))
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
        params = sampling_params or SamplingParams()
        if params.n != 1:
            raise RequestError(f"n {params.n}: must be 1 for a stream")
        (generation,) = self._submit(self._encode(prompt, "prompt"), params)
        return self._chunks(generation)

    def encode_chat(
        self, messages: Sequence[Message], options: ChatOptions | None = None
    ) -> list[int]:
        """Return the prompt's token ids for a conversation; see `chat`."""
        return encode_chat(self.tokenizer, messages, options)

    def stats(self) -> SchedulerStats:
        """Return the scheduler's gauges and counters."""
        with self._lock:
            return self._scheduler.stats()

    def check_integrity(self) -> None:
        """Compare all books of the scheduler.

        Raises:
            AssertionError: A page or a row is lost or has two owners.
        """
        with self._lock:
            self._scheduler.check_integrity()

    def shutdown(self) -> None:
        """End what is running and let go of the engine; safe to call twice."""
        with self._lock:
            if not self._is_shut_down:
                self._scheduler.shutdown()
                self._dispatch()
                self._engine.shutdown()
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
        try:
            ids = encode_text(self.tokenizer, prompt) if isinstance(prompt, str) else list(prompt)
        except RequestError as error:
            raise RequestError(f"{where}: {error}") from error
        limits = self._engine.limits
        if not ids:
            raise RequestError(f"{where}: is empty; at least one token is needed")
        if len(ids) >= limits.max_seq_len:
            raise RequestError(
                f"{where}: has {len(ids)} tokens; prompt and output together may have "
                f"{limits.max_seq_len}, and at least one is generated"
            )
        for token_id in (min(ids), max(ids)):
            if not 0 <= token_id < limits.vocab_size:
                raise RequestError(
                    f"{where}: token id {token_id}: must be from 0 to {limits.vocab_size - 1}"
                )
        return np.array(ids, dtype=np.int32)

    def _submit(self, ids: np.ndarray, params: SamplingParams) -> list[Generation]:
        """Hand a prompt to the scheduler, once per choice."""
        with self._lock:
            if self._is_shut_down:
                raise RequestError("this LLM was shut down; make a new one")
            group = []
            for index in range(params.n):
                each = params
                if params.n > 1 and params.seed is not None:
                    each = replace(params, seed=(params.seed + index) % 2**63)
                uid = next(self._uids)
                generation = Generation(uid, len(ids), each, self._pieces)
                self._open[uid] = generation
                self._io.put([UserMsg(uid, ids, each)])
                group.append(generation)
            return group

    def _step(self) -> None:
        """Let the scheduler do one step and hand out what it sent."""
        with self._lock:
            self._scheduler.step()
            self._dispatch()

    def _settle(self) -> None:
        """When nobody waits, let the step that was launched ahead end, so that all pages return."""
        while not self._open and self._scheduler.has_work:
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

    def _chunks(self, generation: Generation) -> Iterator[Chunk]:
        """Yield what is new after each step until the end."""
        num_chars = num_tokens = 0
        try:
            while not generation.is_ended:
                # Another caller's step may have brought something, or even the end.
                if num_chars == len(generation.text):
                    self._step()
                if num_chars < len(generation.text) and not generation.is_ended:
                    text, tokens = generation.text[num_chars:], generation.token_ids[num_tokens:]
                    num_chars, num_tokens = len(generation.text), len(generation.token_ids)
                    yield Chunk(text=text, token_ids=tokens, finish_reason=None)
        finally:
            self._abandon([generation])
            self._settle()
        choice = generation.choice()
        yield Chunk(
            text=generation.text[num_chars:],
            token_ids=generation.token_ids[num_tokens:],
            finish_reason=choice["finish_reason"],
            error=choice["error"],
            usage=Generation.usage([generation]),
        )

    def _abandon(self, generations: Sequence[Generation]) -> None:
        """End requests whose caller has left; the scheduler may have been left inside a step."""
        left = [g for g in generations if not g.is_ended]
        if not left:
            return
        with self._lock:
            self._io.put([AbortMsg(g.uid, "the caller left") for g in left])
            try:
                while not all(g.is_ended for g in left):
                    self._step()
            except Exception:
                logger.exception("a step failed while requests were being aborted")
                self._scheduler.abort_all("a step failed")
                self._dispatch()


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Tell one prompt from many: token ids are one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    batch = list(prompts)
    if batch and all(isinstance(each, int | np.integer) for each in batch):
        return [[int(each) for each in batch if isinstance(each, int | np.integer)]]
    for i, each in enumerate(batch):
        if not isinstance(each, str | Sequence | np.ndarray) or isinstance(each, Mapping):
            raise RequestError(f"prompts[{i}]: must be a text or token ids, not {each!r}")
    return [each for each in batch if not isinstance(each, int)]


def _per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """Give each prompt its parameters."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if len(params) != num_prompts:
        raise RequestError(
            f"sampling_params: has {len(params)} entries for {num_prompts} prompts; give one for "
            "all, or one for each"
        )
    return list(params)


def _completion(group: Sequence[Generation]) -> Completion:
    """Put the choices of one prompt together."""
    choices = [generation.choice() for generation in group]
    return Completion(**choices[0], usage=Generation.usage(group), choices=choices)
