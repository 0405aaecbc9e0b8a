"""The messages to and from a scheduler: plain typed records, light to import.

Requests go in one by one; results come out as one message per step, so that their cost does not
grow with the number of running requests by more than the numbers themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from minisgl.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
"""How a request ended: an end-of-sequence or stop token, its length, an abort, or a fault."""

RefusalCode = Literal["", "invalid", "full"]
"""Why a request was refused: its own fault, or too many wait; empty for one that was accepted."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of the model's own distribution at one position.

    That is before penalties, bias, temperature and filters, so a token that these forced may be
    unlikely here.

    Attributes:
        token_id: The token that was sampled there, or that the prompt has.
        logprob: Its natural log-probability.
        top_ids: The likeliest tokens, likeliest first; as many as were asked for.
        top_logprobs: Their log-probabilities.
    """

    token_id: int
    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class UserMsg:
    """Please generate.

    Attributes:
        uid: Names the request in every later message; unused by any request that is not finished.
        input_ids: ``[prompt_len]`` int32 token ids.
        sampling_params: How to sample.
        priority: Larger is more urgent; only the ``priority`` policy looks at it.
        deadline_s: Seconds from the scheduler's receipt after which the request is aborted, or
            ``None``.
    """

    uid: int
    input_ids: np.ndarray
    sampling_params: SamplingParams
    priority: int = 0
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class AbortMsg:
    """Please stop a request, wherever it is; harmless when it is unknown or finished.

    Attributes:
        uid: The request.
        reason: Why, for the terminal result.
    """

    uid: int
    reason: str = "aborted by the client"


@dataclass(frozen=True, slots=True)
class FlushMsg:
    """Please forget every cached prefix that no running request uses; answered by `FlushReply`."""


@dataclass(frozen=True, slots=True)
class StatsMsg:
    """Please answer with `StatsReply`."""


@dataclass(frozen=True, slots=True)
class ExitMsg:
    """Please abort what is left and leave the loop."""


SchedulerMsg = UserMsg | AbortMsg | FlushMsg | StatsMsg | ExitMsg
"""What a scheduler receives."""


@dataclass(frozen=True, slots=True)
class FinishedReq:
    """The one terminal result of a request.

    Attributes:
        uid: The request.
        reason: How it ended.
        detail: For ``"abort"`` and ``"error"``, why, for the user's eyes.
        stop_token_id: For ``"stop"``, the token that ended it; it is among the output tokens.
        num_prompt_tokens: Length of the prompt.
        num_output_tokens: Tokens that were generated and sent, the stop token included.
        num_cached_tokens: Prompt tokens whose KV was found in the prefix cache.
        refusal: For an ``"error"`` that was a refusal, whose fault it is.
    """

    uid: int
    reason: FinishReason
    detail: str = ""
    stop_token_id: int | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    refusal: RefusalCode = ""


@dataclass(frozen=True, slots=True)
class ResultMsg:
    """Everything that became known in one step.

    Attributes:
        uids: Requests that got a token, in order; ``uids[i]`` got ``token_ids[i]``. Almost always
            distinct, but where one occurs twice, the order is that of its tokens.
        token_ids: The new tokens.
        finished: Requests that ended; their last token, if any, is among the above.
        logprobs: Index into ``token_ids`` to log-probabilities, for the requests that asked.
        prompt_logprobs: Request to those of its next prompt tokens; they begin with the second
            one, and all have come when the request gets its first token or ends.
    """

    uids: list[int]
    token_ids: list[int]
    finished: list[FinishedReq] = field(default_factory=list)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FlushReply:
    """What a flush did.

    Attributes:
        num_flushed_pages: Pages that are free now.
        num_kept_pages: Cached pages that running requests use.
    """

    num_flushed_pages: int
    num_kept_pages: int


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A scheduler at one moment; gauges first, then counters since its start.

    Attributes:
        num_waiting: Requests in the queue.
        num_running: Requests that hold a row, half-computed prompts included.
        num_pages: Pages of the pool.
        num_free_pages: Pages that nobody owns.
        num_evictable_pages: Cached pages that no running request uses.
        num_prefill_steps: Launched prefill steps.
        num_decode_steps: Launched decode steps.
        num_prefill_tokens: Tokens computed in prefill steps, recomputed ones included.
        num_cached_tokens: Tokens that prefills found in the prefix cache.
        num_output_tokens: Tokens sent.
        num_discarded_tokens: Tokens sampled past a request's end and dropped.
        num_retractions: Times that a running request went back to the queue.
        num_finished: Terminal results by reason.
    """

    num_waiting: int
    num_running: int
    num_pages: int
    num_free_pages: int
    num_evictable_pages: int
    num_prefill_steps: int
    num_decode_steps: int
    num_prefill_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_discarded_tokens: int
    num_retractions: int
    num_finished: dict[FinishReason, int]


@dataclass(frozen=True, slots=True)
class StatsReply:
    """The answer to `StatsMsg`."""

    stats: SchedulerStats


ReplyMsg = ResultMsg | FlushReply | StatsReply
"""What a scheduler sends."""
