"""Edits of the logits that only some requests want: penalties, bias, minimum lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from minisgl.core import Req


def edit_logits(
    logits: torch.Tensor,
    reqs: Sequence[Req],
    seq_lens: np.ndarray,
    newest: torch.Tensor | None,
    eos_token_ids: frozenset[int],
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
        eos_token_ids: Not to be sampled before a request's ``min_tokens``.

    Returns:
        ``[num_rows, vocab_size]`` float32, a new tensor.
    """
    edited = logits.to(torch.float32, copy=True)
    for row, req in enumerate(reqs):
        if req.sampling_params.has_penalties:
            last = None if newest is None else newest[row]
            _penalize(edited[row], req, int(seq_lens[row]), last)
    _add_biases(edited, reqs, seq_lens, eos_token_ids)
    return edited


def _penalize(row: torch.Tensor, req: Req, seq_len: int, newest: torch.Tensor | None) -> None:
    """Apply the penalties of one request to its ``[vocab_size]`` logits, in place."""
    params = req.sampling_params
    num_known = seq_len if newest is None else seq_len - 1
    history = torch.from_numpy(req.tokens[:num_known].astype(np.int64)).to(row.device)
    if newest is not None:
        history = torch.cat((history, newest.view(1).long()))
    if params.repetition_penalty != 1.0:
        seen = row[history]
        factor = params.repetition_penalty
        row[history] = torch.where(seen > 0, seen / factor, seen * factor)
    output = history[req.prompt_len :]
    if params.frequency_penalty:
        counts = torch.zeros_like(row)
        counts.index_add_(0, output, torch.ones_like(output, dtype=row.dtype))
        row -= counts * params.frequency_penalty
    if params.presence_penalty:
        present = torch.zeros_like(row)
        present[output] = params.presence_penalty
        row -= present


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
