"""What observers are told: small frozen records, made only when someone observes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from minisgl.plugin.spec import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from minisgl.core import Req


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """An engine that has started, or is about to.

    Attributes:
        model: What the model source calls the model.
        device: Where it runs, such as ``"cuda:0"``.
        dtype: Name of the dtype of weights and KV.
        vocab_size: Token ids are below this.
        page_size: Tokens of a KV page.
        num_pages: Pages that requests can use.
        max_running_reqs: Most requests of a batch.
        max_seq_len: Most tokens of a request.
        tp_size: Tensor-parallel ranks.
        backends: Name of what serves each kind.
        start_s: Seconds that the start took; 0 while logits processors are being asked for.
    """

    model: str
    device: str
    dtype: str
    vocab_size: int
    page_size: int
    num_pages: int
    max_running_reqs: int
    max_seq_len: int
    tp_size: int
    backends: Mapping[str, str]
    start_s: float


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step whose result the host has seen.

    Attributes:
        phase: Phase of its batch.
        batch_size: Requests.
        num_tokens: Tokens that were computed.
        num_cached_tokens: Prompt tokens that requests starting in this step found in the cache.
        duration_s: Seconds from launch to result.
    """

    phase: Phase
    batch_size: int
    num_tokens: int
    num_cached_tokens: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request that got its terminal message.

    Attributes:
        uid: Its number.
        finish_reason: ``"stop"``, ``"length"``, ``"abort"`` or ``"error"``.
        num_prompt_tokens: Tokens of its prompt.
        num_cached_tokens: Of these, found in the prefix cache.
        num_output_tokens: Tokens generated.
        first_token_s: Seconds from arrival to the first token, or ``None`` without one.
        duration_s: Seconds from arrival to the end.
    """

    uid: int
    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    first_token_s: float | None
    duration_s: float


class LogitsProcessor(Protocol):
    """Changes logits between penalties and sampling; called once per step that samples.

    That is after every prefill that ends a prompt and every decode step, whether this ran from a
    captured graph or not; a processor itself is never captured. What it makes of a row depends on
    that row and its request alone and is the same each time: a step may be computed again after a
    fault or a retraction, and every tensor-parallel rank has processors of its own.
    """

    def __call__(self, logits: Tensor, reqs: Sequence[Req]) -> None:
        """Change rows in place.

        Every row keeps at least one finite logit, no NaN comes in, and what is ``-inf`` stays so.

        Args:
            logits: ``[num_sampled, vocab_size]`` float32 on the engine's device; penalties, biases
                and forbidden ends are in them. Work on it goes to the current stream; waiting for
                the device here stalls every step.
            reqs: The request of each row; not to be changed. ``req.output_ids`` may lack the
                newest token while steps overlap.
        """
