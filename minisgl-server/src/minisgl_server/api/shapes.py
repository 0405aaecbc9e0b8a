"""How answers look: OpenAI's objects for chats and for plain completions."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from minisgl.message.text import FinishedText, TextLogprob

Json = dict[str, Any]  # JSON


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
        self.id = f"{self.prefix}-{secrets.token_hex(16)}"
        self._model = model
        self._created = int(time.time())

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

    def __init__(self, model: str) -> None:
        """Begin an answer; see `Shape`."""
        super().__init__(model)
        self._offsets: dict[int, int] = {}  # where each choice's next token starts

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
        return {
            "index": index,
            "text": text,
            "logprobs": None if logprobs is None else self._logprobs(index, logprobs),
            "finish_reason": None if end is None else end.reason,
            "stop_reason": None if end is None else end.stop_reason,
        }

    def _logprobs(self, index: int, logprobs: Sequence[TextLogprob]) -> Json:
        offset = self._offsets.get(index, 0)
        tokens, offsets = [], []
        for each in logprobs:
            token = _text(each.token)
            tokens.append(token)
            offsets.append(offset)
            offset += len(token)
        self._offsets[index] = offset
        return {
            "tokens": tokens,
            "token_logprobs": [each.logprob for each in logprobs],
            "top_logprobs": [
                dict(zip(map(_text, each.top), each.top_logprobs, strict=True)) for each in logprobs
            ],
            "text_offset": offsets,
        }


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
