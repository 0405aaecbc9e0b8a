"""How answers look: OpenAI's objects for chats and for plain completions."""

from __future__ import annotations

import codecs
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.message.text import FinishedText, TextLogprob
from minisgl_server.api.stream import new_id

Json = dict[str, Any]  # JSON


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that comes before its completion.

    Attributes:
        text: The prompt.
        first: Text of its first token, of which nobody can say how likely it was; ``None`` where
            log-probabilities are not wanted.
    """

    text: str
    first: str | None = None


class Shape(ABC):
    """The objects of one request.

    Attributes:
        id: Of the answer; ours, whatever the client sends.
    """

    prefix: str
    object_name: str
    chunk_name: str

    def __init__(self, model: str) -> None:
        """Begin an answer.

        Args:
            model: What clients call the model.
        """
        self.id = new_id(self.prefix)
        self._model = model
        self._created = int(time.time())

    @property
    def has_echo(self) -> bool:
        """Whether prompts come before the texts of their choices."""
        return False

    @abstractmethod
    def begin(self, index: int, prompt_logprobs: Sequence[TextLogprob]) -> None:
        """Put the prompt before the next text of a choice, where there is an echo."""

    @abstractmethod
    def opening(self, index: int) -> Json | None:
        """Return the first chunk's choice, before any text, or nothing."""

    @abstractmethod
    def delta(self, index: int, text: str, logprobs: Sequence[TextLogprob] | None) -> Json:
        """Return the choice of a chunk with new text."""

    @abstractmethod
    def ending(self, index: int, end: FinishedText, logprobs: Sequence[TextLogprob] | None) -> Json:
        """Return the choice of the last chunk."""

    @abstractmethod
    def choice(
        self, index: int, text: str, end: FinishedText, logprobs: Sequence[TextLogprob] | None
    ) -> Json:
        """Return a choice of an answer in one piece."""

    def chunk(self, choices: list[Json]) -> Json:
        """Return a chunk of a stream."""
        return {
            "id": self.id,
            "object": self.chunk_name,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def answer(self, choices: list[Json], usage: Json) -> Json:
        """Return an answer in one piece."""
        return {
            "id": self.id,
            "object": self.object_name,
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "usage": usage,
        }


class ChatShape(Shape):
    """``/v1/chat/completions``."""

    prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def begin(self, index: int, prompt_logprobs: Sequence[TextLogprob]) -> None:
        """Do nothing: a chat has no echo."""

    def opening(self, index: int) -> Json:
        """Tell who speaks."""
        return _chat_chunk(index, {"role": "assistant", "content": ""}, None, None)

    def delta(self, index: int, text: str, logprobs: Sequence[TextLogprob] | None) -> Json:
        """Return new text."""
        return _chat_chunk(index, {"content": text}, None, logprobs)

    def ending(self, index: int, end: FinishedText, logprobs: Sequence[TextLogprob] | None) -> Json:
        """Return the finish reason."""
        return _chat_chunk(index, {}, end, logprobs)

    def choice(
        self, index: int, text: str, end: FinishedText, logprobs: Sequence[TextLogprob] | None
    ) -> Json:
        """Return a message."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": _chat_logprobs(logprobs),
            "finish_reason": end.reason,
            "stop_reason": end.stop_reason,
        }


class CompletionShape(Shape):
    """``/v1/completions``."""

    prefix = "cmpl"
    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(self, model: str, echoes: Sequence[Echo] = ()) -> None:
        """Begin an answer.

        Args:
            model: What clients call the model.
            echoes: What comes before each choice's own text, by index; empty without echo.
        """
        super().__init__(model)
        self._echoes = echoes
        self._begun: dict[int, tuple[str, Json]] = {}  # what the choice's next text begins with
        self._offsets: dict[int, _Offsets] = {}

    @property
    def has_echo(self) -> bool:
        """Whether there are echoes."""
        return bool(self._echoes)

    def begin(self, index: int, prompt_logprobs: Sequence[TextLogprob]) -> None:
        """Put the prompt before the next text of a choice."""
        if not self._echoes:
            return
        echo = self._echoes[index]
        self._offsets[index] = _Offsets(len(echo.text))
        logprobs = _columns(prompt_logprobs, _offsets_before_end(echo.text, prompt_logprobs))
        if echo.first is not None:
            for name, value in _UNKNOWN.items():
                logprobs[name].insert(0, value)
            logprobs["tokens"][0] = echo.first
        self._begun[index] = (echo.text, logprobs)

    def opening(self, index: int) -> None:
        """Return nothing: there is no role."""

    def delta(self, index: int, text: str, logprobs: Sequence[TextLogprob] | None) -> Json:
        """Return new text."""
        return self._choice(index, text, None, logprobs)

    def ending(self, index: int, end: FinishedText, logprobs: Sequence[TextLogprob] | None) -> Json:
        """Return the finish reason."""
        return self._choice(index, "", end, logprobs)

    def choice(
        self, index: int, text: str, end: FinishedText, logprobs: Sequence[TextLogprob] | None
    ) -> Json:
        """Return a text."""
        return self._choice(index, text, end, logprobs)

    def _choice(
        self,
        index: int,
        text: str,
        end: FinishedText | None,
        logprobs: Sequence[TextLogprob] | None,
    ) -> Json:
        prompt, prompt_logprobs = self._begun.pop(index, ("", None))
        return {
            "index": index,
            "text": prompt + text,
            "logprobs": self._logprobs(index, prompt_logprobs, logprobs),
            "finish_reason": None if end is None else end.reason,
            "stop_reason": None if end is None else end.stop_reason,
        }

    def _logprobs(
        self, index: int, before: Json | None, logprobs: Sequence[TextLogprob] | None
    ) -> Json | None:
        if logprobs is None:
            return None
        offsets = self._offsets.setdefault(index, _Offsets(0))
        columns = _columns(logprobs, [offsets.advance(each.token) for each in logprobs])
        if before is None:
            return columns
        return {name: before[name] + column for name, column in columns.items()}


class _Offsets:
    """Where in the text each token begins; tokens may hold parts of characters."""

    def __init__(self, start: int) -> None:
        self._next = start
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def advance(self, token: bytes) -> int:
        """Return where ``token`` begins, and go on behind it."""
        offset = self._next
        self._next += len(self._decoder.decode(token))
        return offset


_UNKNOWN: Json = {"tokens": "", "token_logprobs": None, "top_logprobs": None, "text_offset": 0}


def _offsets_before_end(text: str, logprobs: Sequence[TextLogprob]) -> list[int]:
    """Return where the last tokens of a text begin.

    Counted from its end: a token before them may have no part in the text, such as a BOS that was
    added to it.
    """
    offsets = _Offsets(0)
    starts = [offsets.advance(each.token) for each in logprobs]
    shift = len(text) - offsets.advance(b"")
    return [max(0, start + shift) for start in starts]


def _columns(logprobs: Sequence[TextLogprob], offsets: Iterable[int]) -> Json:
    """Write log-probabilities as completions have them: a list of each kind."""
    return {
        "tokens": [_text(each.token) for each in logprobs],
        "token_logprobs": [each.logprob for each in logprobs],
        "top_logprobs": [_top(each) for each in logprobs],
        "text_offset": list(offsets),
    }


def _top(logprob: TextLogprob) -> dict[str, float]:
    """Return the likeliest tokens and the one that is there; of equal texts the likelier one."""
    top: dict[str, float] = {}
    for token, value in zip(logprob.top, logprob.top_logprobs, strict=True):
        top.setdefault(_text(token), value)
    top.setdefault(_text(logprob.token), logprob.logprob)
    return top


def usage(ends: Sequence[FinishedText], num_choices: int) -> Json:
    """Count tokens: each prompt once, the outputs of all choices.

    Args:
        ends: Of all sequences, the choices of a prompt next to one another.
        num_choices: Choices of each prompt.
    """
    firsts = ends[::num_choices]
    num_prompt = sum(end.num_prompt_tokens for end in firsts)
    num_output = sum(end.num_output_tokens for end in ends)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(end.num_cached_tokens for end in firsts)},
    }


def _chat_chunk(
    index: int,
    delta: Json,
    end: FinishedText | None,
    logprobs: Sequence[TextLogprob] | None,
) -> Json:
    choice: Json = {
        "index": index,
        "delta": delta,
        "logprobs": _chat_logprobs(logprobs),
        "finish_reason": None if end is None else end.reason,
    }
    if end is not None:
        choice["stop_reason"] = end.stop_reason
    return choice


def _chat_logprobs(logprobs: Sequence[TextLogprob] | None) -> Json | None:
    if logprobs is None:
        return None
    content = [
        {
            **_chat_token(each.token, each.logprob),
            "top_logprobs": [
                _chat_token(token, value)
                for token, value in zip(each.top, each.top_logprobs, strict=True)
            ],
        }
        for each in logprobs
    ]
    return {"content": content, "refusal": None}


def _chat_token(token: bytes, logprob: float) -> Json:
    return {"token": _text(token), "logprob": logprob, "bytes": list(token)}


def _text(token: bytes) -> str:
    return token.decode(errors="replace")
