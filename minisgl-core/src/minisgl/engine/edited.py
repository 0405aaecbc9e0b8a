"""Sampling again, from edited logits, for requests that ask for more than the sampler does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from minisgl.core import Context, Req
from minisgl.engine.contract import EngineLimits
from minisgl.engine.edits import LogitEditor
from minisgl.engine.graph import StepOutput
from minisgl.engine.packed import GrowingStaging
from minisgl.engine.row_params import RowParams, sampling_inputs
from minisgl.plugin.records import LogitsProcessor


class SampledStep(NamedTuple):
    """A step that has sampled from the plain logits, and whom its rows belong to.

    Attributes:
        output: Logits and tokens.
        reqs: The request of each row.
        rows: ``[num_rows]`` int32, of the page table.
        seq_lens: ``[num_rows]`` int32 tokens before the sampled one.
    """

    output: StepOutput
    reqs: list[Req]
    rows: np.ndarray
    seq_lens: np.ndarray


class EditedSampler:
    """Samples the rows of a step again whose logits are to be edited.

    Everything goes behind the step on its stream, and nothing waits for it: what the host knows of
    an edit is brought to the device in one copy.
    """

    def __init__(
        self,
        ctx: Context,
        params: RowParams,
        limits: EngineLimits,
        processors: Sequence[LogitsProcessor],
    ) -> None:
        """Start without requests, on the stream that the steps will run on.

        Args:
            ctx: Of the engine, filled.
            params: What the sampler is to do with each row.
            limits: Of the engine.
            processors: Applied to edited logits, in order.
        """
        self._ctx = ctx
        self._params = params
        self._processors = processors
        self._editor = LogitEditor(ctx.token_pool, limits.vocab_size, limits.eos_token_ids)
        self._flat_pool = ctx.token_pool.view(-1)
        self._pool_width = ctx.token_pool.shape[1]
        self._staging = GrowingStaging(ctx.token_pool.device)

    def admit(self, reqs: Sequence[Req]) -> None:
        """Learn of requests whose prompts end in the step to come; `RowParams` knows them."""
        if reqs:
            self._editor.admit(reqs)

    def sample(self, step: SampledStep) -> torch.Tensor:
        """Sample again where it is needed, and overwrite these tokens in the token pool.

        Returns:
            ``[num_rows]`` int32 tokens of all rows.
        """
        indices = self._params.edited(step.rows, step.seq_lens)
        if not len(indices):
            return step.output.tokens
        rows, seq_lens = step.rows[indices], step.seq_lens[indices]
        plan = self._editor.plan(rows, seq_lens)
        views = self._staging.send(
            {
                "index": indices,
                "positions": seq_lens,
                "write_loc": rows.astype(np.int64) * self._pool_width + seq_lens,
                **self._params.select(rows),
                **plan.arrays,
            }
        )
        logits, is_whole = step.output.logits, len(indices) == len(step.reqs)
        chosen = logits if is_whole else logits.index_select(0, views["index"])
        # Biases are added at places of the flat logits, whatever strides the model left.
        edited = chosen.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        self._editor.apply(plan, views, edited)
        reqs = step.reqs if is_whole else [step.reqs[i] for i in indices]
        for processor in self._processors:
            processor(edited, reqs)
        inputs = sampling_inputs(views, views["positions"])
        is_all_greedy, hints = self._params.is_all_greedy(rows), self._params.hints(rows)
        tokens = self._ctx.kernels.sample(edited, inputs, is_all_greedy, hints)
        self._flat_pool.index_copy_(0, views["write_loc"], tokens)
        return tokens if is_whole else step.output.tokens.index_copy(0, views["index"], tokens)
