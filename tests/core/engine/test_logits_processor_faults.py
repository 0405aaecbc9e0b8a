"""A logits processor that raises ends the requests with which it does, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from minisgl.core import Req, SamplingParams
from minisgl.kvcache.contract import CacheConfig
from minisgl.kvcache.radix import RadixCache
from minisgl.message.types import FinishedReq, ResultMsg, UserMsg
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.contract import PolicyConfig
from minisgl.scheduler.io import OfflineIO
from minisgl.scheduler.policy import FcfsPolicy
from minisgl.scheduler.scheduler import Scheduler
from tests.core.engine.engine_harness import make_engine
from tests.tiny_models import TinyModel, save_tiny_model

PROMPTS = ([5, 9, 200, 31], [7] * 19, [300, 12, 4, 4, 18])
# The steps that are run again must penalise no token twice.
PARAMS = (
    SamplingParams(max_tokens=6, ignore_eos=True, repetition_penalty=1.5, presence_penalty=-2.0),
    SamplingParams(max_tokens=6, ignore_eos=True),
    SamplingParams(max_tokens=6, frequency_penalty=2.0, logit_bias={2: 100.0}, min_tokens=6),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processor_model")
    save_tiny_model(folder, TinyModel(vocab_size=320))
    return folder


class Refuses:
    """Raises when request 1 has a number of output tokens."""

    def __init__(self, num_outputs: int | None) -> None:
        self._num_outputs = num_outputs

    def __call__(self, logits: Tensor, reqs: Sequence[Req]) -> None:
        for req in reqs:
            if req.uid == 1 and self._num_outputs is not None:
                num_outputs = req.device_len - req.prompt_len
                if num_outputs >= self._num_outputs:
                    raise ValueError("no more of this")


def run(
    model: Path, num_outputs: int | None, graph_size: int
) -> tuple[dict[int, FinishedReq], dict[int, list[int]]]:
    """Serve all prompts; returns how each ended, and its tokens."""
    engine = make_engine(model, (Refuses(num_outputs),), cuda_graph_max_bs=graph_size)
    line = OfflineIO()
    cache = RadixCache(CacheConfig(engine.limits.page_size))
    config = SchedulerConfig(is_checked_every_step=True)
    scheduler = Scheduler(engine, cache, FcfsPolicy(PolicyConfig()), line, config)
    for uid, (ids, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        line.put([UserMsg(uid, np.array(ids, np.int32), params)])
    ended: dict[int, FinishedReq] = {}
    tokens: dict[int, list[int]] = {uid: [] for uid in range(len(PROMPTS))}
    while scheduler.has_work or line.has_messages:
        scheduler.step()
        for reply in line.take():
            assert isinstance(reply, ResultMsg)
            ended |= {each.uid: each for each in reply.finished}
            for uid, token in zip(reply.uids, reply.token_ids, strict=True):
                tokens[uid].append(token)
    engine.shutdown()
    return ended, tokens


@pytest.mark.parametrize("graph_size", [0, 4], ids=["eager", "graph"])
@pytest.mark.parametrize("num_outputs", [0, 3], ids=["prefill", "decode"])
def test_only_the_request_that_it_refuses_ends(
    model: Path, num_outputs: int, graph_size: int
) -> None:
    _, expected = run(model, None, graph_size)
    ended, tokens = run(model, num_outputs, graph_size)
    assert ended[1].reason == "error"
    assert "ValueError: no more of this" in ended[1].detail
    for uid in (0, 2):
        assert ended[uid].reason == "length"
        assert tokens[uid] == expected[uid]
