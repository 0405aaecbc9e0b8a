"""What generating gives back: plain mappings, ready for JSON."""

from __future__ import annotations

from typing import NotRequired, TypedDict


class Usage(TypedDict):
    """How many tokens a request took.

    Attributes:
        prompt_tokens: Length of the prompt.
        completion_tokens: Generated tokens, over all choices.
        total_tokens: Both.
        cached_tokens: Prompt tokens whose KV was found in the prefix cache.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int


class TokenLogprob(TypedDict):
    """A token's log-probability.

    Attributes:
        token_id: The token.
        logprob: Its natural log-probability in the model's own distribution.
        top: The likeliest tokens at this position with theirs, likeliest first.
    """

    token_id: int
    logprob: float
    top: dict[int, float]


class Choice(TypedDict):
    """One generated text.

    Attributes:
        text: The text, without what stopped it.
        token_ids: Every generated token, the one that stopped it included.
        finish_reason: ``stop``, ``length``, ``abort`` or ``error``.
        stop_reason: The stop string or stop token id that ended it, if one did.
        error: What went wrong, with the reasons ``abort`` and ``error``.
        logprobs: One entry per token, if they were asked for, else ``None``.
        prompt_logprobs: One entry per prompt token, of which the first is ``None``, if they were
            asked for, else ``None``.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None
    error: str | None
    logprobs: list[TokenLogprob] | None
    prompt_logprobs: list[TokenLogprob | None] | None


class Completion(Choice):
    """The answer to one prompt: its first choice, and all of them.

    Attributes:
        usage: Token counts of the request.
        choices: The ``n`` choices in order, the first included.
    """

    usage: Usage
    choices: list[Choice]


class Chunk(TypedDict):
    """A piece of a streamed answer.

    Attributes:
        text: New text; may be empty in the last chunk.
        token_ids: New tokens.
        finish_reason: ``None`` but in the last chunk.
        error: As in `Choice`.
        usage: In the last chunk.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None
    error: NotRequired[str | None]
    usage: NotRequired[Usage]
