"""What the scheduler needs of an engine; a fake one drives the scheduler in tests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from minisgl.core import Batch
from minisgl.message.types import TokenLogprobs
from minisgl.plugin.selection import SelectedBackend

__all__ = [
    "EngineLimits",
    "ForwardOutput",
    "PromptScores",
    "StepEngine",
    "StepResult",
    "TokenLogprobs",
]


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Sizes that the engine settled at start; the same on every rank.

    Attributes:
        num_pages: Pages that requests can use.
        page_size: Tokens of a page.
        max_running_reqs: Rows of the page table.
        max_seq_len: Most tokens of a request, prompt and output together.
        vocab_size: Token ids are below this.
        eos_token_ids: Every id that ends a sequence, from all sources.
    """

    num_pages: int
    page_size: int
    max_running_reqs: int
    max_seq_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of some prompt tokens of one request.

    Attributes:
        index: Of the request in the batch.
        start: Index of the first of these tokens in the prompt, at least 1.
        logprobs: Of the tokens from there on.
    """

    index: int
    start: int
    logprobs: list[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step made, on the host.

    Attributes:
        token_ids: ``[num_sampled]`` int32; one per request that samples, in request order.
        logprobs: Row in ``token_ids`` to log-probabilities, for the requests that asked.
        scores: Prefill only: of prompt tokens, for the requests that asked.
    """

    token_ids: np.ndarray
    logprobs: dict[int, TokenLogprobs]
    scores: list[PromptScores] = field(default_factory=list)


class ForwardOutput(ABC):
    """A launched step."""

    @abstractmethod
    def wait(self) -> StepResult:
        """Wait until the step has run and return its result; may be called once."""


class StepEngine(ABC):
    """An engine as the scheduler sees it.

    Steps run in the order in which they are launched, and each sees the tokens that the earlier
    ones sampled: a decode step reads its input from the device-side token pool, so that it can be
    launched before the host has seen the token.

    Attributes:
        limits: Its sizes.
        backends: Name of what serves each kind; empty where nobody was chosen.
        picked: The backends of these names; one that serves several phases stands there for each.
    """

    limits: EngineLimits
    backends: Mapping[str, str] = MappingProxyType({})
    picked: tuple[SelectedBackend, ...] = ()

    @abstractmethod
    def forward_batch(self, batch: Batch) -> ForwardOutput:
        """Launch one step.

        ``batch.reqs``, ``phase``, ``is_sampled`` and ``host`` are set by the caller. Of a prefill
        request the tokens ``cached_len … device_len`` are taken from the host, and where it
        ``is_scoring`` the log-probabilities of the prompt tokens behind them are made; of a decode
        request the newest one from the token pool. The caller accounts (``complete_one``)
        afterwards.
        """
