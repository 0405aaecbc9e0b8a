"""Drives ranks, one or several, through a workload."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from minisgl.config.load import Settings
from minisgl.engine.build import EngineRequest, describe_to_probes
from minisgl.message.types import AbortMsg, FinishedReq, ResultMsg, UserMsg
from minisgl.parallel.group import RankGroup
from minisgl.parallel.ranks import LocalRank, RankRequest, Ranks
from minisgl.plugin.manager import PluginManager
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.build import SchedulerBackends
from minisgl.scheduler.io import OfflineIO
from minisgl.tokenizer.eos import eos_token_ids
from minisgl.weights.resolve import open_configured
from tests.tp.rank_pool import RankPool

ROOMY = {"num_page_override": 256, "page_size": 4, "max_running_req": 16}


@dataclass
class Group:
    """Ranks, and what came out of them."""

    ranks: Ranks
    line: OfflineIO
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, FinishedReq] = field(default_factory=dict)

    def add(self, uid: int, prompt: Sequence[int], params: SamplingParams) -> None:
        self.tokens[uid] = []
        self.line.put([UserMsg(uid, np.array(prompt, np.int32), params)])

    def abort(self, uid: int) -> None:
        self.line.put([AbortMsg(uid)])

    def step(self) -> None:
        self.ranks.step()
        for reply in self.line.take():
            assert isinstance(reply, ResultMsg)
            for uid, token in zip(reply.uids, reply.token_ids, strict=True):
                self.tokens[uid].append(token)
            for result in reply.finished:
                assert result.uid not in self.finished, "one terminal result each"
                self.finished[result.uid] = result

    def run(self) -> None:
        while len(self.finished) < len(self.tokens) or self.ranks.has_work:
            self.step()

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[int]]:
        """Complete prompts, all at once."""
        first = len(self.tokens)
        for i, prompt in enumerate(prompts):
            self.add(first + i, prompt, params)
        self.run()
        return [self.tokens[first + i] for i in range(len(prompts))]


def settings_for(folder: Path, **settings: Any) -> tuple[Settings, PluginManager]:
    manager = PluginManager.bootstrap(env={})
    given = {"model": str(folder), "dtype": "float32", "device": "cpu", **settings}
    return manager.load_settings(given), manager


def make_request(folder: Path, settings: Mapping[str, Any]) -> RankRequest:
    filled, manager = settings_for(folder, **settings)
    files = open_configured(filled, manager)
    ends = eos_token_ids(files, files.load_tokenizer())  # as the other ranks find them
    engine = EngineRequest(filled, manager, files, eos_token_ids=ends)
    return RankRequest(
        engine=engine,
        backends=SchedulerBackends.resolve(manager, filled, describe_to_probes(engine)),
        line=OfflineIO(),
        around=lambda line: line,
    )


@contextmanager
def open_group(
    folder: Path, tp: int, pool: RankPool, settings: Mapping[str, Any] = ROOMY
) -> Iterator[Group]:
    """Start ranks; at the end all books are compared, and all of them exit."""
    request = make_request(folder, {**settings, "tp": tp})
    build: Callable[[RankRequest], Ranks] = LocalRank
    ranks = build(request) if tp == 1 else RankGroup(request, pool.start)
    try:
        yield Group(ranks, request.line)
        if not ranks.failure:
            ranks.check_integrity()
    finally:
        ranks.shutdown()
