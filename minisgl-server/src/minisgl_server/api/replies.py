"""How answers look, for the description of the API; they are made by `shapes` and the routes."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

FinishReason = Literal["stop", "length"]


class _Reply(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PromptTokensDetails(_Reply):
    """More about a prompt."""

    cached_tokens: int


class Usage(_Reply):
    """What a request took, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ChatTokenLogprob(_Reply):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprobs(ChatTokenLogprob):
    """The same with the likeliest tokens at its place."""

    top_logprobs: list[ChatTokenLogprob]


class ChatLogprobs(_Reply):
    """Log-probabilities of a chat's answer."""

    content: list[ChatTokenLogprobs]
    refusal: None


class ChatMessage(_Reply):
    """What the model says."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_Reply):
    """One answer of several."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None


class ChatCompletion(_Reply):
    """The answer to a chat in one piece."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionLogprobs(_Reply):
    """Log-probabilities of a completion, a list of each kind."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(_Reply):
    """One completion of several."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None


class Completion(_Reply):
    """Completions in one piece."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class Tokens(_Reply):
    """A prompt as tokens."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None


class Text(_Reply):
    """Tokens as text."""

    prompt: str


class Aborted(_Reply):
    """How many answers were stopped."""

    num_aborted: int


class Flushed(_Reply):
    """What became of the prefix cache."""

    num_flushed_pages: int
    num_kept_pages: int


class Health(_Reply):
    """That the server works."""

    status: Literal["ok"]


class Version(_Reply):
    """Versions of the server and of all distributions of minisgl."""

    version: str
    distributions: dict[str, str]


class ModelCard(_Reply):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(_Reply):
    """All names of the served model."""

    object: Literal["list"]
    data: list[ModelCard]
