"""Edits of the logits that only some requests want: penalties, bias, minimum lengths.

Penalties touch only tokens that a sequence has had, which are few beside the vocabulary. So they
are gathered and scattered by the tokens of the pool, where those of the output already are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from minisgl.core import Req
from minisgl.device import to_device


@dataclass(frozen=True, slots=True)
class EditPlan:
    """What a step edits, as its host knows it.

    Attributes:
        arrays: To be brought to the device. Of each row, ``[num_rows]``: ``begins`` (its first
            place in the flat token pool), ``prompt_lens`` and ``lens`` (tokens), int64;
            ``repetition``, ``presence`` and ``frequency``, float32. And ``[num_biases]``, where
            there are any: ``bias``, float32, and ``bias_loc``, its place in the flat logits, int64.
        num_tokens: Most tokens of a row with a repetition penalty, 0 when there is none.
        num_outputs: Most output tokens of a row with another penalty, 0 when there is none.
    """

    arrays: dict[str, np.ndarray]
    num_tokens: int
    num_outputs: int


class LogitEditor:
    """Applies what requests want of their logits beside temperature and filters.

    What a request wants is noted when it is first computed, by its row of the page table.
    """

    def __init__(
        self, token_pool: torch.Tensor, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        """Start without requests.

        Args:
            token_pool: ``[num_rows + 1, max_seq_len]`` int32, see `Context`; prompts with
                penalties are written to it.
            vocab_size: Columns of the logits.
            eos_token_ids: Not to be sampled before a request's ``min_tokens``.
        """
        num_rows, self._width = token_pool.shape
        self._token_pool = token_pool
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._places = torch.arange(self._width, device=token_pool.device)
        self._prompt_lens = np.zeros(num_rows, np.int64)
        self._penalties = np.zeros((num_rows, 3), np.float32)  # repetition, presence, frequency
        self._biases: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # row to tokens and values
        self._forbidden: dict[int, tuple[int, np.ndarray]] = {}  # row to until which seq_len, what

    def admit(self, reqs: Sequence[Req]) -> None:
        """Learn of requests whose prompts end in the step to come; the host knows their tokens."""
        rows = [req.table_idx for req in reqs]
        params = [req.sampling_params for req in reqs]
        self._prompt_lens[rows] = [req.prompt_len for req in reqs]
        self._penalties[rows] = [
            (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params
        ]
        for row, req, wanted in zip(rows, reqs, params, strict=True):
            self._biases.pop(row, None)
            self._forbidden.pop(row, None)
            if wanted.has_penalties:
                tokens = to_device(req.token_ids, self._token_pool.device)
                self._token_pool[row, : req.num_tokens] = tokens
            if wanted.logit_bias:
                biases = np.array(list(wanted.logit_bias.items()))
                self._biases[row] = biases[:, 0].astype(np.int64), biases[:, 1].astype(np.float32)
            if wanted.min_tokens:
                ends = {*wanted.stop_token_ids, *self._eos_token_ids}
                known = [token for token in ends if token < self._vocab_size]
                until = req.prompt_len + wanted.min_tokens
                self._forbidden[row] = until, np.array(known, np.int64)

    def plan(self, rows: np.ndarray, seq_lens: np.ndarray) -> EditPlan:
        """Say what is to be edited.

        Args:
            rows: ``[num_rows]`` int32 rows of the page table, at least one.
            seq_lens: ``[num_rows]`` int32 tokens before the one to be sampled.
        """
        lens, prompt_lens = seq_lens.astype(np.int64), self._prompt_lens[rows]
        repetition, presence, frequency = self._penalties[rows].T
        num_outputs = lens - prompt_lens
        arrays = {
            "begins": rows.astype(np.int64) * self._width,
            "prompt_lens": prompt_lens,
            "lens": lens,
            "repetition": repetition,
            "presence": presence * (num_outputs > 0),
            "frequency": frequency,
            **self._bias_of(rows, seq_lens),
        }
        # What is gathered is as wide as the longest row, so one without penalties does not count.
        has_others = (presence != 0) | (frequency != 0)
        return EditPlan(
            arrays,
            num_tokens=int(lens[repetition != 1].max(initial=0)),
            num_outputs=int(num_outputs[has_others].max(initial=0)),
        )

    def apply(
        self, plan: EditPlan, views: Mapping[str, torch.Tensor], logits: torch.Tensor
    ) -> None:
        """Apply each row's penalties, bias and minimum length.

        Repetition penalty counts prompt and output (Keskar et al., arXiv:1909.05858), presence and
        frequency penalty count the output alone, as in OpenAI's API.

        Args:
            plan: Of these rows.
            views: Its arrays on the device.
            logits: ``[num_rows, vocab_size]`` float32, contiguous; changed.
        """
        if plan.num_tokens:
            self._penalize_repetition(plan.num_tokens, views, logits)
        if plan.num_outputs:
            self._penalize_output(plan.num_outputs, views, logits)
        if "bias" in views:
            logits.view(-1).index_add_(0, views["bias_loc"], views["bias"])

    def _penalize_repetition(
        self, num_tokens: int, views: Mapping[str, torch.Tensor], logits: torch.Tensor
    ) -> None:
        """Make tokens of prompt and output less likely; a token that comes twice gets it once."""
        tokens = self._tokens_at(self._places[:num_tokens], views)
        before, penalty = logits.gather(1, tokens), views["repetition"][:, None]
        after = torch.where(before > 0, before / penalty, before * penalty)
        logits.scatter_(1, tokens, after)  # the same wherever a token comes again

    def _penalize_output(
        self, num_outputs: int, views: Mapping[str, torch.Tensor], logits: torch.Tensor
    ) -> None:
        """Take presence off each token of the output once, and frequency as often as it comes."""
        places = self._places[:num_outputs]
        tokens = self._tokens_at(places + views["prompt_lens"][:, None], views)
        # Rows without output read their prompt's end here, and have no presence penalty.
        logits.scatter_(1, tokens, logits.gather(1, tokens) - views["presence"][:, None])
        is_output = places < (views["lens"] - views["prompt_lens"])[:, None]
        logits.scatter_add_(1, tokens, is_output * -views["frequency"][:, None])

    def _tokens_at(self, places: torch.Tensor, views: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return ``[num_rows, num_places]`` int64 tokens; places behind the last have the last."""
        last = views["lens"][:, None] - 1
        loc = torch.minimum(places, last) + views["begins"][:, None]
        return self._token_pool.view(-1)[loc].long()

    def _bias_of(self, rows: np.ndarray, seq_lens: np.ndarray) -> dict[str, np.ndarray]:
        """Return what is added, and to which logits of all rows one after the other; or nothing."""
        if not (self._biases or self._forbidden):
            return {}
        where, values = [], []
        for index, (row, seq_len) in enumerate(zip(rows.tolist(), seq_lens.tolist(), strict=True)):
            if row in self._biases:
                tokens, biases = self._biases[row]
                where.append(tokens + index * self._vocab_size)
                values.append(biases)
            until, ends = self._forbidden.get(row, (0, None))
            if ends is not None and seq_len < until:
                where.append(ends + index * self._vocab_size)
                values.append(np.full(len(ends), -np.inf, np.float32))
        if not where:
            return {}
        return {"bias_loc": np.concatenate(where), "bias": np.concatenate(values)}
