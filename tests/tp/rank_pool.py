"""Processes that serve as ranks 1 and up of one group after another, so that torch is loaded once.

They run the same `SchedulerWorker` as real followers; only starting, watching and ending them is
this module's own, which `test_llm_ranks.py` tests with real ones.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import resource
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import zmq

from minisgl import errors
from minisgl.config.load import Settings
from minisgl.engine.contract import ForwardOutput, StepResult
from minisgl.engine.engine import Engine
from minisgl.errors import CommError, MinisglError, WorkerError
from minisgl.message.lifecycle import ReadyMsg, WorkerReport
from minisgl.message.wire import wire_codec
from minisgl.parallel.followers import FollowerPlan, Followers
from minisgl.plugin.manager import PluginManager
from minisgl.scheduler.build import SchedulerBackends
from minisgl.workers.contract import WorkerSpec
from minisgl.workers.scheduler import SchedulerWorker

_TIMEOUT_S = 240.0  # the machine may have much else to do


@dataclass(frozen=True, slots=True)
class RankTask:
    """What a process of the pool does next: be a rank, and maybe a faulty one."""

    spec: WorkerSpec
    wrong_step: int | None = None  # whose first token is changed


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What a rank said when it was ready."""

    limits: dict[str, int]
    num_threads: int
    grown_bytes: int  # peak memory of the process, above what it was before


class FaultyWorker(SchedulerWorker):
    """A rank that samples another token than the others once."""

    wrong_step = 0

    def _build(
        self, on_lost: Callable[[], None] | None = None
    ) -> tuple[Engine, SchedulerBackends, str]:
        engine, backends, name = super()._build(on_lost)
        launch, num_launched = engine.forward_batch, 0

        def forward_batch(batch: Any) -> ForwardOutput:
            nonlocal num_launched
            num_launched += 1
            output = launch(batch)
            return WrongOutput(output) if num_launched == self.wrong_step else output

        engine.forward_batch = forward_batch  # type: ignore[method-assign]
        return engine, backends, name


class WrongOutput(ForwardOutput):
    def __init__(self, output: ForwardOutput) -> None:
        self._output = output

    def wait(self) -> StepResult:
        result = self._output.wait()
        tokens = np.array(result.token_ids)
        tokens[0] = (tokens[0] + 1) % 300
        return replace(result, token_ids=tokens)


def serve_ranks(connection: Connection) -> None:
    """Be one rank after another; a failing one takes the process with it, as in real life."""
    context: zmq.Context[Any] = zmq.Context()
    while True:
        task: RankTask | None = connection.recv()
        if task is None:
            return
        try:
            serve_rank(task, connection, context)
        except Exception as error:  # noqa: BLE001  # it is sent to the test
            connection.send((type(error).__name__, str(error)))
            os._exit(1)
        connection.send("exited")


def serve_rank(task: RankTask, connection: Connection, context: zmq.Context[Any]) -> None:
    import torch  # noqa: PLC0415  # the module is imported by the test's process too

    manager = PluginManager.bootstrap()
    manager.settings_tree()
    settings = pickle.loads(task.spec.settings)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def report(message: WorkerReport) -> None:
        assert isinstance(message, ReadyMsg)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        connection.send(RankFacts(message.facts, torch.get_num_threads(), grown * 1024))

    kind = SchedulerWorker if task.wrong_step is None else FaultyWorker
    worker = kind(task.spec, settings, manager, context, wire_codec())
    if isinstance(worker, FaultyWorker):
        assert task.wrong_step is not None
        worker.wrong_step = task.wrong_step
    worker.run(report)


class RankPool:
    """Up to three processes; started when they are needed."""

    def __init__(self) -> None:
        self._lines: list[Connection] = []
        self.facts: list[RankFacts] = []  # of the newest group
        self.settings: dict[int, Settings] = {}  # of ranks that get other ones than rank 0
        self.wrong_step: dict[int, int] = {}

    def start(self, plan: FollowerPlan) -> Followers:
        """Let processes be the followers of a group."""
        specs = [self._own(spec) for spec in plan.specs()]
        spawn = multiprocessing.get_context("spawn")
        while len(self._lines) < len(specs):
            ours, theirs = spawn.Pipe()
            spawn.Process(target=serve_ranks, args=(theirs,), daemon=True).start()
            theirs.close()
            self._lines.append(ours)
        self.facts = []
        for spec, line in zip(specs, self._lines, strict=False):
            line.send(RankTask(spec, self.wrong_step.get(spec.index)))
        return PooledFollowers(self, self._lines[: len(specs)])

    def forget(self) -> None:
        """Leave the processes, of which some have failed, to themselves; they end."""
        self._lines = []

    def close(self) -> None:
        """Let them end."""
        for line in self._lines:
            line.send(None)

    def _own(self, spec: WorkerSpec) -> WorkerSpec:
        settings = self.settings.get(spec.index)
        return spec if settings is None else replace(spec, settings=pickle.dumps(settings))


class PooledFollowers(Followers):
    """Followers that are not started or killed but borrowed."""

    def __init__(self, pool: RankPool, lines: list[Connection]) -> None:
        self._pool = pool
        self._lines = lines
        self._is_over = False

    def wait_until_ready(self, timeout_s: float) -> None:
        for line in self._lines:
            assert line.poll(_TIMEOUT_S), "a rank is not ready in time"
            facts = line.recv()
            assert isinstance(facts, RankFacts), f"a rank failed: {facts}"
            self._pool.facts.append(facts)

    def wait_for_failure(self, timeout_s: float) -> MinisglError | None:
        self._pool.forget()
        self._is_over = True
        found = []
        for line in self._lines:
            if line.poll(timeout_s):
                kind, text = line.recv()
                found.append(getattr(errors, kind, WorkerError)(text))
        return next((error for error in found if not isinstance(error, CommError)), None)

    def end(self, timeout_s: float = 0.0) -> None:
        if self._is_over:
            return
        self._is_over = True
        for line in self._lines:
            assert line.poll(_TIMEOUT_S), "a rank did not exit in time"
            said = line.recv()
            assert said == "exited", f"a rank failed: {said}"
