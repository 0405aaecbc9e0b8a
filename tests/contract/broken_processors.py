"""Hooks that offer logits processors with one fault each, and some that are right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from minisgl.core import Req
from minisgl.plugin.records import EngineInfo, LogitsProcessor

Processor = Callable[[Tensor, Sequence[Req]], object]


def offer(processor: Processor) -> list[LogitsProcessor]:
    return [cast("LogitsProcessor", processor)]


def forbids_repetition(engine: EngineInfo) -> list[LogitsProcessor]:
    """Right: the newest token that the host has seen is not sampled again."""

    def process(logits: Tensor, reqs: Sequence[Req]) -> None:
        for row, req in enumerate(reqs):
            logits[row, int(req.token_ids[-1])] = float("-inf")

    return [*offer(process)]


def takes_no_argument() -> list[LogitsProcessor]:
    """Right: halves every logit."""

    def process(logits: Tensor, reqs: Sequence[Req]) -> None:
        logits.mul_(0.5)

    return [*offer(process)]


def returns_new_logits(engine: EngineInfo) -> list[LogitsProcessor]:
    return offer(lambda logits, reqs: logits / 2)


def returns_one_processor(engine: EngineInfo) -> LogitsProcessor:
    return takes_no_argument()[0]


def changes_the_first_row_only(engine: EngineInfo) -> list[LogitsProcessor]:
    def process(logits: Tensor, reqs: Sequence[Req]) -> None:
        for _ in reqs:
            logits[0].mul_(0.9)

    return offer(process)


def centres_the_batch(engine: EngineInfo) -> list[LogitsProcessor]:
    def process(logits: Tensor, reqs: Sequence[Req]) -> None:
        logits.sub_(logits.mean(dim=0, keepdim=True))

    return offer(process)


def adds_noise(engine: EngineInfo) -> list[LogitsProcessor]:
    def process(logits: Tensor, reqs: Sequence[Req]) -> None:
        logits.add_(torch.randn(logits.shape[1], device=logits.device))

    return offer(process)


def counts_its_calls(engine: EngineInfo) -> list[LogitsProcessor]:
    calls: list[int] = []

    def process(logits: Tensor, reqs: Sequence[Req]) -> None:
        calls.append(1)
        logits.div_(len(calls))

    return offer(process)


def divides_by_zero(engine: EngineInfo) -> list[LogitsProcessor]:
    def process(logits: Tensor, reqs: Sequence[Req]) -> None:
        logits[:, :2] = 0.0
        logits.div_(logits)

    return offer(process)


def forbids_everything(engine: EngineInfo) -> list[LogitsProcessor]:
    def process(logits: Tensor, reqs: Sequence[Req]) -> None:
        logits.fill_(float("-inf"))

    return offer(process)


def allows_what_was_forbidden(engine: EngineInfo) -> list[LogitsProcessor]:
    def process(logits: Tensor, reqs: Sequence[Req]) -> None:
        logits.clamp_(min=-100.0)

    return offer(process)


def appends_a_token(engine: EngineInfo) -> list[LogitsProcessor]:
    def process(logits: Tensor, reqs: Sequence[Req]) -> None:
        for req in reqs:
            req.num_tokens += 1

    return offer(process)


def needs_an_output(engine: EngineInfo) -> list[LogitsProcessor]:
    def process(logits: Tensor, reqs: Sequence[Req]) -> None:
        for row, req in enumerate(reqs):
            logits[row, int(req.output_ids[-1])] -= 1.0

    return offer(process)


def knows_one_vocabulary(engine: EngineInfo) -> list[LogitsProcessor]:
    bias = torch.zeros(4096)

    def process(logits: Tensor, reqs: Sequence[Req]) -> None:
        logits.add_(bias)

    return offer(process)


def remembers_uids(engine: EngineInfo) -> list[LogitsProcessor]:
    first_tokens: dict[int, int] = {}

    def process(logits: Tensor, reqs: Sequence[Req]) -> None:
        for row, req in enumerate(reqs):
            token = first_tokens.setdefault(req.uid, int(req.token_ids[0]))
            logits[row, token] -= 5.0

    return offer(process)


def needs_gradients(engine: EngineInfo) -> list[LogitsProcessor]:
    def process(logits: Tensor, reqs: Sequence[Req]) -> None:
        free = logits.detach().requires_grad_()
        free.square().sum().backward()

    return offer(process)
