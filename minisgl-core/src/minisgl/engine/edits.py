"""Edits of the logits that only some requests want: penalties, bias, minimum lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from minisgl.core import Req
from minisgl.engine.token_counts import TokenCounts


class LogitEditor:
    """Applies what requests want of their logits beside temperature and filters."""

    def __init__(
        self, vocab_size: int, device: torch.device, eos_token_ids: frozenset[int]
    ) -> None:
        """Start without requests.

        Args:
            vocab_size: Columns of the logits.
            device: Where they are.
            eos_token_ids: Not to be sampled before a request's ``min_tokens``.
        """
        self._counts = TokenCounts(vocab_size, device)
        self._eos_token_ids = eos_token_ids

    def admit(self, req: Req) -> None:
        """Learn of a request whose prompt ends in the step to come."""
        self._counts.admit(req)

    def edit(
        self,
        logits: torch.Tensor,
        reqs: Sequence[Req],
        seq_lens: np.ndarray,
        newest: torch.Tensor | None,
    ) -> torch.Tensor:
        """Apply each request's penalties, bias and minimum length.

        Repetition penalty counts prompt and output (Keskar et al., arXiv:1909.05858), presence and
        frequency penalty count the output alone, as in OpenAI's API.

        Args:
            logits: ``[num_rows, vocab_size]``; not changed.
            reqs: The request of each row.
            seq_lens: ``[num_rows]`` tokens before the one to be sampled.
            newest: ``[num_rows]`` int32 last token of each row on the device, for decode, where the
                host may not have seen it yet; ``None`` when the host knows all tokens.

        Returns:
            ``[num_rows, vocab_size]`` float32, a new tensor.
        """
        edited = logits.to(torch.float32, copy=True)
        penalized = [i for i, req in enumerate(reqs) if req.sampling_params.has_penalties]
        if penalized:
            self._penalize(edited, penalized, reqs, seq_lens, newest)
        _add_biases(edited, reqs, seq_lens, self._eos_token_ids)
        return edited

    def _penalize(
        self,
        edited: torch.Tensor,
        indices: list[int],
        reqs: Sequence[Req],
        seq_lens: np.ndarray,
        newest: torch.Tensor | None,
    ) -> None:
        """Apply penalties to the rows of ``indices``, in place."""
        index = torch.tensor(indices, device=edited.device)
        in_prompt, in_output = self._counts.read(
            [reqs[i].table_idx for i in indices],
            [int(seq_lens[i]) for i in indices],
            None if newest is None else newest[index],
        )
        params = [reqs[i].sampling_params for i in indices]
        repetition, presence, frequency = torch.tensor(
            [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params],
            device=edited.device,
        ).T[:, :, None]  # [num_penalized, 1] each
        is_in_output = in_output > 0
        rows = edited[index]
        repeated = torch.where(rows > 0, rows / repetition, rows * repetition)
        rows = torch.where(in_prompt | is_in_output, repeated, rows)
        edited[index] = rows - frequency * in_output - presence * is_in_output


def _add_biases(
    logits: torch.Tensor, reqs: Sequence[Req], seq_lens: np.ndarray, eos: frozenset[int]
) -> None:
    """Add logit biases, and forbid ends of sequence before ``min_tokens``, in place."""
    entries: list[tuple[int, int, float]] = []
    for row, req in enumerate(reqs):
        params = req.sampling_params
        entries.extend((row, token, bias) for token, bias in params.logit_bias.items())
        if seq_lens[row] - req.prompt_len < params.min_tokens:
            forbidden = {*params.stop_token_ids, *eos}
            entries.extend((row, token, float("-inf")) for token in forbidden)
    vocab_size = logits.shape[1]
    entries = [entry for entry in entries if entry[1] < vocab_size]
    if entries:
        rows, tokens, values = (
            torch.tensor(column, device=logits.device) for column in zip(*entries, strict=True)
        )
        logits.index_put_((rows, tokens), values.to(logits.dtype), accumulate=True)
