"""Log-probabilities of sampled tokens, for the requests that ask."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minisgl.core import Req
from minisgl.engine.contract import TokenLogprobs


class PendingLogprobs:
    """Log-probabilities that the device may still be computing."""

    def __init__(self, logits: torch.Tensor, token_ids: torch.Tensor, reqs: Sequence[Req]) -> None:
        """Submit the computation.

        Args:
            logits: ``[num_rows, vocab_size]`` as the model made them; not changed.
            token_ids: ``[num_rows]`` int32 sampled tokens.
            reqs: The request of each row.
        """
        wanted = [(i, r.sampling_params.logprobs) for i, r in enumerate(reqs)]
        self._counts = [(row, count) for row, count in wanted if count is not None]
        if not self._counts:
            return
        rows = torch.tensor([row for row, _ in self._counts], device=logits.device)
        all_logprobs = torch.log_softmax(logits[rows].float(), dim=-1)
        self._tokens = token_ids[rows].long()
        chosen = all_logprobs.gather(1, self._tokens[:, None])[:, 0]
        num_top = min(max(count for _, count in self._counts), logits.shape[1])
        top = all_logprobs.topk(num_top, dim=-1)
        copies = (self._tokens, chosen, top.indices, top.values)
        self._host = [t.to("cpu", non_blocking=True) for t in copies]

    def collect(self) -> dict[int, TokenLogprobs]:
        """Return row to log-probabilities; the step's event has been waited for."""
        if not self._counts:
            return {}
        tokens, chosen, top_ids, top_values = (t.tolist() for t in self._host)
        return {
            row: TokenLogprobs(
                token_id=tokens[i],
                logprob=chosen[i],
                top_ids=tuple(top_ids[i][:count]),
                top_logprobs=tuple(top_values[i][:count]),
            )
            for i, (row, count) in enumerate(self._counts)
        }
