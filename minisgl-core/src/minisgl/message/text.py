"""The messages between the API server, the tokenizers, the scheduler and the detokenizer.

The way of a request: `TokenizeMsg` to a tokenizer, ``UserMsg`` to the scheduler, which announces
it with `StartedMsg` and sends its tokens to the detokenizer, which sends `TextMsg` to the server.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from minisgl.message.types import FinishReason, RefusalCode
from minisgl.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation; JSON stays text on its way, because the template alone knows its shape.

    Attributes:
        messages: JSON list of messages.
        add_generation_prompt: End with the start of the assistant's turn.
        continue_final_message: Leave the last message open.
        template: Used in place of the model's own.
        template_kwargs: JSON object of further variables for the template.
    """

    messages: str
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template: str | None = None
    template_kwargs: str = "{}"


@dataclass(frozen=True, slots=True)
class TokenizeMsg:
    """Please tokenize a prompt and hand it to the scheduler, once per uid.

    Attributes:
        uids: One per completion of the prompt.
        prompt: Text, token ids or a conversation.
        sampling_params: For all; a seed is counted up from one uid to the next.
        priority: As in ``UserMsg``.
        deadline_s: As in ``UserMsg``.
        add_special_tokens: Whether a text gets its BOS.
    """

    uids: list[int]
    prompt: str | list[int] | ChatPrompt
    sampling_params: SamplingParams
    priority: int = 0
    deadline_s: float | None = None
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class CountMsg:
    """Please tokenize a prompt and answer with `TokensReply` or `RefusedMsg`.

    Attributes:
        uid: Of the question.
        prompt: What to tokenize.
        add_special_tokens: Whether a text gets its BOS.
        must_fit: Whether a prompt that cannot run is refused.
    """

    uid: int
    prompt: str | list[int] | ChatPrompt
    add_special_tokens: bool = True
    must_fit: bool = False


@dataclass(frozen=True, slots=True)
class DecodeMsg:
    """Please turn token ids into text; answered by `DecodedReply` or `RefusedMsg`."""

    uid: int
    token_ids: list[int]
    skip_special_tokens: bool = False


@dataclass(frozen=True, slots=True)
class LimitsMsg:
    """What prompts may be, known once the engine has started.

    Attributes:
        max_seq_len: Prompt and output together, in tokens.
        vocab_size: Token ids are below this.
    """

    max_seq_len: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class StartedMsg:
    """A request has reached the scheduler; comes before any of its tokens.

    Attributes:
        uid: The request.
        sampling_params: How its text is made of tokens.
    """

    uid: int
    sampling_params: SamplingParams


@dataclass(frozen=True, slots=True)
class TokensReply:
    """The answer to `CountMsg`.

    Attributes:
        uid: Of the question.
        token_ids: The prompt.
        tokens: Each of them as text.
    """

    uid: int
    token_ids: list[int]
    tokens: list[str]


@dataclass(frozen=True, slots=True)
class DecodedReply:
    """The answer to `DecodeMsg`."""

    uid: int
    text: str


@dataclass(frozen=True, slots=True)
class RefusedMsg:
    """A prompt could not be tokenized; nothing of it reached the scheduler."""

    uids: list[int]
    detail: str


@dataclass(frozen=True, slots=True)
class TextLogprob:
    """A token's log-probability.

    Attributes:
        token: Its bytes; UTF-8, but maybe a part of a character.
        token_id: Its number.
        logprob: Its natural log-probability.
        top: The likeliest tokens with theirs, likeliest first.
        top_ids: Their numbers.
        top_logprobs: Their log-probabilities.
    """

    token: bytes
    token_id: int
    logprob: float
    top: list[bytes]
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(frozen=True, slots=True)
class FinishedText:
    """The end of a request, after all of its text.

    Attributes:
        uid: The request.
        reason: How it ended.
        detail: Why, with ``"abort"`` and ``"error"``.
        refusal: As in ``FinishedReq``.
        stop_reason: The stop string or stop token id that ended it.
        num_prompt_tokens: Length of the prompt.
        num_output_tokens: Tokens up to the stop string or token, that one included.
        num_cached_tokens: Prompt tokens that the prefix cache had.
    """

    uid: int
    reason: FinishReason
    detail: str = ""
    refusal: RefusalCode = ""
    stop_reason: str | int | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TextMsg:
    """Everything that one step said, as text.

    Attributes:
        uids: Requests that got tokens.
        texts: ``texts[i]`` is what ``uids[i]`` can show now; may be empty.
        token_ids: The token behind each text; -1 for text that was held back for the end.
        finished: Requests that ended; their text is among the above.
        logprobs: Index into ``texts`` to log-probabilities.
        prompt_logprobs: As in ``ResultMsg``.
    """

    uids: list[int]
    texts: list[str]
    token_ids: list[int]
    finished: list[FinishedText] = field(default_factory=list)
    logprobs: dict[int, TextLogprob] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TextLogprob]] = field(default_factory=dict)
