"""Which tokens each penalised request has had, counted on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from minisgl.core import Req


class TokenCounts:
    """Counts of prompt and output tokens of the rows whose requests have penalties.

    A row is counted from the host's tokens once, when its request is computed for the first time;
    after that each step adds the one token that it reads, which the host may not have seen. Rows
    without penalties take no memory.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        """Start without rows."""
        self._vocab_size = vocab_size
        self._device = device
        self._slots: dict[int, int] = {}  # row to its place in both tensors
        self._free: list[int] = []
        self._num_counted: dict[int, int] = {}  # row to tokens, prompt and output
        self._in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._in_output = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)

    def admit(self, req: Req) -> None:
        """Count the tokens of a request, all of which the host knows, or forget its row."""
        row = req.table_idx
        slot = self._slots.pop(row, None)
        if slot is not None:
            self._free.append(slot)
        if not req.sampling_params.has_penalties:
            return
        slot = self._slots[row] = self._take_slot()
        self._in_prompt[slot] = False
        self._in_output[slot] = 0
        tokens = torch.from_numpy(req.token_ids.astype(np.int64)).to(self._device)
        self._in_prompt[slot, tokens[: req.prompt_len]] = True
        output = tokens[req.prompt_len :]
        self._in_output[slot].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        self._num_counted[row] = req.num_tokens

    def read(
        self, rows: Sequence[int], seq_lens: Sequence[int], newest: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the counts of rows, up to the tokens that a step reads.

        Args:
            rows: That have penalties.
            seq_lens: Tokens of each before the one to be sampled.
            newest: ``[num_rows]`` int32 last token of each, on the device; ``None`` when `admit`
                has counted all.

        Returns:
            ``[num_rows, vocab_size]`` bool, whether a token is in the prompt, and int32, how often
            in the output.
        """
        slots = torch.tensor([self._slots[row] for row in rows], device=self._device)
        if newest is not None:
            # A step that failed may be run again, and must not count its token twice.
            is_new = [
                self._num_counted[row] < seq_len
                for row, seq_len in zip(rows, seq_lens, strict=True)
            ]
            amount = torch.tensor(is_new, dtype=torch.int32, device=self._device)
            self._in_output.index_put_((slots, newest.long()), amount, accumulate=True)
            self._num_counted.update(zip(rows, seq_lens, strict=True))
        return self._in_prompt[slots], self._in_output[slots]

    def _take_slot(self) -> int:
        """Return a place that nobody has, making room for more where there is none."""
        if not self._free:
            num = self._in_prompt.shape[0]
            more = max(4, num)
            self._in_prompt = torch.cat(
                (self._in_prompt, self._in_prompt.new_zeros(more, self._vocab_size))
            )
            self._in_output = torch.cat(
                (self._in_output, self._in_output.new_zeros(more, self._vocab_size))
            )
            self._free.extend(range(num + more - 1, num - 1, -1))
        return self._free.pop()
