"""Edited logits against their definition: penalties, bias, minimum lengths, rows given on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.core import Context, Req, SamplingParams
from minisgl.engine.contract import EngineLimits
from minisgl.engine.edited import EditedSampler, SampledStep
from minisgl.engine.edits import LogitEditor
from minisgl.engine.graph import StepOutput
from minisgl.engine.packed import GrowingStaging
from minisgl.engine.row_params import RowParams
from minisgl.ops.contract import KernelConfig
from minisgl.ops.table import build_kernel_table
from minisgl.ops.torch_set import TorchKernelSet
from minisgl.plugin.records import LogitsProcessor

CPU = torch.device("cpu")
VOCAB_SIZE, WIDTH, NUM_ROWS, EOS = 50, 24, 6, 2
ENDS = frozenset({EOS, VOCAB_SIZE})  # the second one is behind the vocabulary
PENALTIES = (
    SamplingParams(repetition_penalty=1.4),
    SamplingParams(repetition_penalty=0.01, presence_penalty=-2.0),
    SamplingParams(presence_penalty=1.5, frequency_penalty=0.7),
    SamplingParams(repetition_penalty=100.0, frequency_penalty=-1.1),
    SamplingParams(),
)
BIASES: Sequence[Mapping[int, float]] = ({}, {EOS: 100.0, VOCAB_SIZE - 1: -3.5}, {0: -100.0})


class Rows:
    """An editor, and the tokens of the requests that have rows of it."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.pool = torch.zeros(NUM_ROWS + 1, WIDTH, dtype=torch.int32)
        self.editor = LogitEditor(self.pool, VOCAB_SIZE, ENDS)
        self.staging = GrowingStaging(CPU, num_bytes=16)  # grows at the first steps
        self.reqs: dict[int, Req] = {}

    def admit(self, row: int, prompt: Sequence[int], params: SamplingParams) -> None:
        req = Req(row, np.array(prompt, np.int32), WIDTH, params)
        req.table_idx = row
        self.reqs[row] = req
        self.editor.admit([req])

    def append(self, row: int, token_id: int) -> None:
        """Let a step have sampled a token."""
        req = self.reqs[row]
        self.pool[row, req.num_tokens] = token_id
        req.append_host(token_id)

    def edit(self, rows: Sequence[int], logits: Tensor) -> Tensor:
        lens = np.array([self.reqs[row].num_tokens for row in rows], np.int32)
        plan = self.editor.plan(np.array(rows, np.int32), lens)
        edited = logits.clone()
        self.editor.apply(plan, self.staging.send(plan.arrays), edited)
        return edited

    def admit_any(self, row: int) -> None:
        """Admit a random request; a third of them go on after they were retracted."""
        num_tokens = int(self.rng.choice([1, 2, 9, WIDTH - 4]))
        params = replace(
            PENALTIES[int(self.rng.integers(len(PENALTIES)))],
            logit_bias=BIASES[int(self.rng.integers(len(BIASES)))],
            min_tokens=int(self.rng.choice([0, 0, 3])),
            stop_token_ids=(5, 2**31 - 1),
        )
        req = Req(row, self.tokens(num_tokens), WIDTH, params)
        for token in self.tokens(int(self.rng.choice([0, 0, 2]))):
            req.append_host(token)
        req.table_idx = row
        self.reqs[row] = req
        self.editor.admit([req])

    def tokens(self, count: int) -> np.ndarray:
        """Make tokens of which many come again, those at both ends of the vocabulary too."""
        return self.rng.choice([0, EOS, 5, 6, 7, VOCAB_SIZE - 1], count).astype(np.int32)


def defined(logits: Tensor, req: Req) -> Tensor:
    """Edit ``[vocab_size]`` logits token by token."""
    edited, params = logits.clone(), req.sampling_params
    for token in set(req.token_ids.tolist()):
        is_above = bool(edited[token] > 0)
        edited[token] *= 1 / params.repetition_penalty if is_above else params.repetition_penalty
    outputs = req.output_ids.tolist()
    for token in set(outputs):
        edited[token] -= params.presence_penalty
        edited[token] -= params.frequency_penalty * outputs.count(token)
    for token, bias in params.logit_bias.items():
        edited[token] += bias
    if len(outputs) < params.min_tokens:
        edited[[t for t in {*params.stop_token_ids, *ENDS} if t < VOCAB_SIZE]] = -torch.inf
    return edited


def make_logits(num_rows: int, seed: int = 0) -> Tensor:
    """Make logits of which some are 0 and some are impossible."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, VOCAB_SIZE, generator=generator) * 8
    logits[:, 6], logits[:, 7] = 0.0, -torch.inf
    return logits


@pytest.mark.parametrize("seed", range(3))
def test_edits_equal_their_definition_in_rows_that_are_given_on(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = Rows(rng)
    for step in range(40):
        for row in range(NUM_ROWS):
            is_full = row in rows.reqs and rows.reqs[row].num_tokens == WIDTH - 1
            if row not in rows.reqs or is_full or rng.random() < 0.1:
                rows.admit_any(row)
        chosen = rng.permutation(NUM_ROWS)[: rng.integers(1, NUM_ROWS + 1)].tolist()
        logits = make_logits(len(chosen), seed=step)
        for got, plain, row in zip(rows.edit(chosen, logits), logits, chosen, strict=True):
            # float32 rounds products and sums in other orders.
            torch.testing.assert_close(got, defined(plain, rows.reqs[row]), rtol=1e-5, atol=1e-4)
        for row in chosen:
            rows.append(row, int(rows.tokens(1)[0]))


def test_a_request_without_parameters_gets_none_of_its_rows_last_one() -> None:
    rows, logits = Rows(np.random.default_rng(0)), make_logits(1)
    everything = SamplingParams(
        repetition_penalty=2.0, frequency_penalty=2.0, logit_bias={9: 5.0}, min_tokens=9
    )
    rows.admit(0, [9, 9, 9], everything)
    rows.append(0, 9)
    assert not torch.equal(rows.edit([0], logits), logits)
    rows.admit(0, [8], SamplingParams())
    rows.append(0, 8)
    assert torch.equal(rows.edit([0], logits), logits)


def test_long_rows_without_penalties_make_no_row_wider() -> None:
    rows = Rows(np.random.default_rng(0))
    rows.admit(0, [8], SamplingParams(repetition_penalty=2.0, presence_penalty=1.0))
    rows.append(0, 9)
    rows.admit(1, [8] * 10, SamplingParams(logit_bias={9: 5.0}))
    for _ in range(5):
        rows.append(1, 9)
    plan = rows.editor.plan(np.array([1, 0], np.int32), np.array([15, 2], np.int32))
    assert (plan.num_tokens, plan.num_outputs) == (2, 1)


class Sampling:
    """Greedy steps over logits that are given."""

    def __init__(self, *processors: LogitsProcessor) -> None:
        ctx = Context(page_size=4)
        ctx.token_pool = torch.zeros(NUM_ROWS + 1, WIDTH, dtype=torch.int32)
        kernels = TorchKernelSet(KernelConfig(CPU, torch.float32))
        ctx.kernels = build_kernel_table([("torch", kernels)])
        limits = EngineLimits(9, 4, NUM_ROWS, WIDTH, VOCAB_SIZE, ENDS)
        self.pool = ctx.token_pool
        self._params = RowParams(NUM_ROWS, VOCAB_SIZE, 0, is_always_edited=bool(processors))
        self._edited = EditedSampler(ctx, self._params, limits, processors)

    def first_tokens(self, logits: Tensor, params: Sequence[SamplingParams]) -> list[int]:
        """Sample behind prompts of one token, 8."""
        reqs = [Req(i, np.array([8], np.int32), WIDTH, each) for i, each in enumerate(params)]
        for row, req in enumerate(reqs):
            req.table_idx = row
        self._params.admit(reqs)
        self._edited.admit(reqs)
        output = StepOutput(logits, logits.argmax(1).int())
        rows = np.arange(len(reqs), dtype=np.int32)
        step = SampledStep(output, reqs, rows, np.ones(len(reqs), np.int32))
        return self._edited.sample(step).tolist()


@pytest.mark.parametrize("num_rows", [1, 3])
def test_biases_meet_their_tokens_whatever_strides_a_model_left(num_rows: int) -> None:
    logits = make_logits(num_rows).T.contiguous().T
    params = [SamplingParams(logit_bias={11 + i: 100.0}) for i in range(num_rows)]
    assert Sampling().first_tokens(logits, params) == list(range(11, 11 + num_rows))


def test_a_processor_gets_plain_and_edited_rows_in_their_order() -> None:
    seen: list[tuple[int, float]] = []

    def note(logits: Tensor, reqs: Sequence[Req]) -> None:
        seen.extend((req.uid, float(row[8])) for req, row in zip(reqs, logits, strict=True))

    logits = torch.full((3, VOCAB_SIZE), 4.0)
    params = [SamplingParams(), SamplingParams(repetition_penalty=2.0), SamplingParams()]
    Sampling(note).first_tokens(logits, params)
    assert seen == [(0, 4.0), (1, 2.0), (2, 4.0)]
    assert torch.equal(logits, torch.full((3, VOCAB_SIZE), 4.0))


def test_only_edited_rows_are_sampled_again() -> None:
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[:, 8] = 1.0
    sampling, banned = Sampling(), SamplingParams(logit_bias={8: -2.0})
    sampling.pool.fill_(7)
    assert sampling.first_tokens(logits, [SamplingParams(), banned, SamplingParams()]) == [8, 0, 8]
    assert sampling.pool[:3, 1].tolist() == [7, 0, 7]  # the step itself writes what is plain
