"""What every logits processor has to do; see `minisgl.plugin.records.LogitsProcessor`.

A hook plugin may return several; they are tested together, in their order, as the engine runs them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.core import Req, SamplingParams
from minisgl.plugin.records import EngineInfo, LogitsProcessor
from minisgl.testing.selection import TestedBackend

VOCAB_SIZES = (131, 4096)
PARAMS = (
    SamplingParams(max_tokens=40),
    SamplingParams(max_tokens=40, temperature=1.0, seed=7, top_k=5),
    SamplingParams(max_tokens=40, temperature=0.7, top_p=0.9, min_tokens=3),
    SamplingParams(max_tokens=40, repetition_penalty=1.2, logit_bias={3: 2.0}),
)


class Processors:
    """What a hook offered for one engine, and requests to run it on."""

    def __init__(self, backend: TestedBackend, vocab_size: int) -> None:
        """Call the hook."""
        self.vocab_size = vocab_size
        self.device = torch.device(backend.machine.device)
        self.offered: Sequence[LogitsProcessor] = backend.factory(engine_info(backend, vocab_size))

    def run(self, logits: Tensor, reqs: Sequence[Req]) -> Tensor:
        """Run all on a copy, as the engine does, and return it."""
        edited = logits.clone()
        with torch.inference_mode():
            for processor in self.offered:
                processor(edited, reqs)
        return edited

    def logits(self, num_rows: int) -> Tensor:
        """Return random logits, ``[num_rows, vocab_size]`` float32."""
        random = torch.Generator().manual_seed(num_rows)
        return (3 * torch.randn(num_rows, self.vocab_size, generator=random)).to(self.device)

    def reqs(self, count: int = 9) -> list[Req]:
        """Return requests of every kind of parameters, with 0, 1 and more tokens of output."""
        return [self.req(uid, prompt_len=1 + 5 * uid, num_outputs=uid % 4) for uid in range(count)]

    def req(self, uid: int, prompt_len: int, num_outputs: int) -> Req:
        """Return a running request whose newest token the host may not have seen."""
        random = np.random.default_rng(uid)
        prompt = random.integers(0, self.vocab_size, prompt_len).astype(np.int32)
        req = Req(uid, prompt, prompt_len + 40, PARAMS[uid % len(PARAMS)])
        for token in random.integers(0, self.vocab_size, num_outputs):
            req.append_host(int(token))
        req.table_idx = uid
        req.device_len = req.num_tokens + uid % 2
        req.cached_len = req.device_len - 1
        return req


def engine_info(backend: TestedBackend, vocab_size: int) -> EngineInfo:
    """Describe an engine that is about to start."""
    return EngineInfo(
        model="tiny",
        device=backend.machine.device,
        dtype="float32",
        vocab_size=vocab_size,
        page_size=16,
        num_pages=64,
        max_running_reqs=16,
        max_seq_len=512,
        tp_size=1,
        backends={},
        start_s=0.0,
    )


@pytest.fixture(params=VOCAB_SIZES, ids=lambda size: f"vocab{size}")
def processors(backend: TestedBackend, request: pytest.FixtureRequest) -> Processors:
    return Processors(backend, request.param)


def test_the_hook_returns_processors(processors: Processors) -> None:
    offered = processors.offered
    assert isinstance(offered, Sequence), "the hook returns a sequence of processors"
    assert all(callable(each) for each in offered), "a processor can be called"


@pytest.mark.parametrize("num_rows", [1, 2, 9])
def test_logits_are_changed_in_place(processors: Processors, num_rows: int) -> None:
    logits = processors.logits(num_rows)
    shape, place = logits.shape, logits.data_ptr()
    with torch.inference_mode():
        for processor in processors.offered:
            result: object = processor(logits, processors.reqs(num_rows))  # type: ignore[func-returns-value]  # a faulty one does
            assert result is None, "a processor changes logits in place and returns nothing"
    assert (logits.shape, logits.data_ptr()) == (shape, place), "logits keep their shape and place"


def test_every_row_can_still_be_sampled(processors: Processors) -> None:
    edited = processors.run(processors.logits(9), processors.reqs())
    assert not edited.isnan().any(), "a processor leaves no NaN"
    assert not (edited == float("inf")).any(), "a processor leaves no logit of +inf"
    assert edited.isfinite().any(dim=1).all(), "a processor leaves at least one token to each row"


def test_what_was_forbidden_stays_forbidden(processors: Processors) -> None:
    logits = processors.logits(9)
    is_forbidden = torch.zeros_like(logits, dtype=torch.bool)
    is_forbidden[:, ::3] = True
    edited = processors.run(logits.masked_fill(is_forbidden, float("-inf")), processors.reqs())
    assert (edited[is_forbidden] == float("-inf")).all(), (
        "a logit of -inf stays: that token was forbidden before"
    )


def test_a_row_does_not_depend_on_its_neighbours(processors: Processors) -> None:
    logits, reqs = processors.logits(9), processors.reqs()
    together = processors.run(logits, reqs)
    backwards = processors.run(logits.flip(0), reqs[::-1]).flip(0)
    rule = "a row's logits depend on that row and its request alone"
    torch.testing.assert_close(backwards, together, msg=lambda text: f"{rule}\n{text}")
    for row, req in enumerate(reqs):
        alone = processors.run(logits[row : row + 1], [req])[0]
        torch.testing.assert_close(alone, together[row], msg=lambda text: f"{rule}\n{text}")


def test_the_same_call_gives_the_same_logits(processors: Processors) -> None:
    logits, reqs = processors.logits(9), processors.reqs()
    torch.manual_seed(1)
    first = processors.run(logits, reqs)
    torch.manual_seed(2)
    is_same = torch.equal(processors.run(logits, reqs), first)
    assert is_same, (
        "a processor is repeatable: a step may be computed again, after a fault or a retraction"
    )


def test_two_ranks_agree(backend: TestedBackend, processors: Processors) -> None:
    logits, reqs = processors.logits(9), processors.reqs()
    first = processors.run(logits, reqs)
    other = Processors(backend, processors.vocab_size)
    is_same = torch.equal(other.run(logits, reqs), first)
    assert is_same, (
        "every tensor-parallel rank has processors of its own, and all give the same logits"
    )


def test_requests_are_not_changed(processors: Processors) -> None:
    reqs = processors.reqs()
    before = [(str(req), req.tokens.tolist(), req.num_tokens) for req in reqs]
    params = [req.sampling_params for req in reqs]
    processors.run(processors.logits(9), reqs)
    after = [(str(req), req.tokens.tolist(), req.num_tokens) for req in reqs]
    assert after == before, "a processor does not change requests"
    assert all(req.sampling_params is p for req, p in zip(reqs, params, strict=True)), (
        "a processor does not change requests"
    )


def test_a_request_is_followed_from_its_prompt_to_its_end(processors: Processors) -> None:
    req = processors.req(0, prompt_len=4, num_outputs=0)
    for token in range(30):
        edited = processors.run(processors.logits(1), [req])
        assert edited.isfinite().any(), "a processor leaves at least one token to each row"
        req.append_host(token % processors.vocab_size)
        req.complete_one()


def test_a_uid_can_be_used_again(backend: TestedBackend, processors: Processors) -> None:
    logits = processors.logits(1)
    first = processors.req(5, prompt_len=3, num_outputs=3)
    other = Req(5, np.full(7, 11, np.int32), 60, PARAMS[0])
    processors.run(logits, [first])
    fresh = Processors(backend, processors.vocab_size).run(logits, [other])
    is_same = torch.equal(processors.run(logits, [other]), fresh)
    assert is_same, "what a processor keeps of a request must not reach a later one of the same uid"
