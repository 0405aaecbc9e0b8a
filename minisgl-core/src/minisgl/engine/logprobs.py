"""Log-probabilities of sampled tokens and of prompts, for the requests that ask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from minisgl.core import Batch, Req
from minisgl.device import to_device, to_host
from minisgl.engine.contract import PromptScores, TokenLogprobs


class PendingLogprobs:
    """Log-probabilities that the device may still be computing."""

    def __init__(self, logits: torch.Tensor, token_ids: torch.Tensor, reqs: Sequence[Req]) -> None:
        """Submit the computation.

        Args:
            logits: ``[num_rows, vocab_size]`` as the model made them; not changed.
            token_ids: ``[num_rows]`` int32 sampled tokens.
            reqs: The request of each row, one of which asks at least.
        """
        wanted = [(i, r.sampling_params.logprobs) for i, r in enumerate(reqs)]
        self._counts = [(row, count) for row, count in wanted if count is not None]
        if len(self._counts) < len(reqs):
            rows = to_device(np.array([row for row, _ in self._counts]), logits.device)
            logits, token_ids = logits[rows], token_ids[rows]
        num_top = max(count for _, count in self._counts)
        self._entries = _Entries(logits, token_ids, num_top)

    def collect(self) -> dict[int, TokenLogprobs]:
        """Return row to log-probabilities; the step's event has been waited for."""
        entries = self._entries.collect([count for _, count in self._counts])
        return {row: entry for (row, _), entry in zip(self._counts, entries, strict=True)}


@dataclass(frozen=True, slots=True)
class ScorePlan:
    """Which logits of a prefill step say how likely its prompts are.

    Attributes:
        rows: ``[num_scored]`` int64, tokens of the batch whose logits are wanted.
        targets: ``[num_scored]`` int32, the prompt token after each.
        spans: Index of the request in the batch, first target's index in the prompt, number of
            targets, and how many of the likeliest tokens are wanted; in the order of ``rows``.
    """

    rows: np.ndarray
    targets: np.ndarray
    spans: list[tuple[int, int, int, int]]


def plan_scores(batch: Batch) -> ScorePlan:
    """Find the prompt tokens of a prefill batch whose log-probabilities are wanted."""
    rows, targets, spans = [np.empty(0, np.int64)], [np.empty(0, np.int32)], []
    first_row = 0
    for index, req in enumerate(batch.reqs):
        top = req.sampling_params.prompt_logprobs
        if top is not None and req.is_scoring:
            # The logits at a position are about the token behind it.
            start = max(req.cached_len, req.num_scored - 1)
            end = min(req.device_len, req.prompt_len - 1)
            if start < end:
                rows.append(np.arange(start, end) + (first_row - req.cached_len))
                targets.append(req.tokens[start + 1 : end + 1])
                spans.append((index, start + 1, end - start, top))
        first_row += req.device_len - req.cached_len
    return ScorePlan(np.concatenate(rows), np.concatenate(targets), spans)


class PendingScores:
    """Log-probabilities of prompt tokens that the device may still be computing."""

    def __init__(self, logits: torch.Tensor, plan: ScorePlan) -> None:
        """Submit the computation.

        Args:
            logits: ``[num_scored, vocab_size]`` as the model made them; not changed.
            plan: What they are about; not empty.
        """
        self._spans = plan.spans
        targets = to_device(plan.targets, logits.device)
        self._entries = _Entries(logits, targets, max(span[3] for span in plan.spans))

    def collect(self) -> list[PromptScores]:
        """Return them by request; the step's event has been waited for."""
        counts = [top for _, _, num, top in self._spans for _ in range(num)]
        entries = iter(self._entries.collect(counts))
        return [
            PromptScores(index, start, [next(entries) for _ in range(num)])
            for index, start, num, _ in self._spans
        ]


class _Entries:
    """Tokens, their log-probabilities, and the likeliest ones beside them."""

    def __init__(self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> None:
        tokens = token_ids.long()
        values = logits.float()
        # Not log_softmax, whose result would be as large as the logits.
        norms = values.logsumexp(dim=-1, keepdim=True)
        chosen = (values.gather(1, tokens[:, None]) - norms)[:, 0]
        top = values.topk(min(num_top, values.shape[1]), dim=-1)
        self._host = [to_host(t) for t in (tokens, chosen, top.indices, top.values - norms)]

    def collect(self, counts: Sequence[int]) -> list[TokenLogprobs]:
        """Return one entry per row, with so many of the likeliest tokens each."""
        columns = zip(counts, *(t.tolist() for t in self._host), strict=True)
        return [
            TokenLogprobs(token, logprob, tuple(ids[:count]), tuple(values[:count]))
            for count, token, logprob, ids, values in columns
        ]
