"""One tensor-parallel rank: an engine and its scheduler."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import zmq

from minisgl.config.load import Settings
from minisgl.config.placement import Placement
from minisgl.distributed.meeting import call_off_meeting
from minisgl.distributed.peers import RANK_ENDED
from minisgl.engine.build import EngineRequest, build_engine, describe_to_probes
from minisgl.engine.contract import EngineLimits, StepEngine
from minisgl.engine.engine import Engine
from minisgl.errors import CommError
from minisgl.message.codec import Codec
from minisgl.message.lifecycle import FailedMsg, ReadyMsg, WorkerReport
from minisgl.message.queues import PullQueue, PushQueue
from minisgl.plugin.hooks import request_observer, step_observer
from minisgl.plugin.manager import PluginManager
from minisgl.scheduler.build import SchedulerBackends, build_scheduler, scheduler_config
from minisgl.scheduler.io import DeadlineIO, ObservedIO, SchedulerIO
from minisgl.scheduler.lockstep import in_lockstep
from minisgl.scheduler.queue_io import QueueIO
from minisgl.scheduler.recorder import Recorder
from minisgl.tokenizer.eos import eos_token_ids
from minisgl.weights.resolve import open_configured
from minisgl.workers.contract import WorkerSpec

logger = logging.getLogger(__name__)

_EXPLAIN_S = 0.5


class SchedulerWorker:
    """Builds engine and scheduler, and runs them until an exit message comes."""

    def __init__(
        self,
        spec: WorkerSpec,
        settings: Settings,
        manager: PluginManager,
        context: zmq.Context[Any],
        codec: Codec[Any],
    ) -> None:
        """Take what the process has; rank 0 starts to listen."""
        self._spec = spec
        self._settings = settings
        self._manager = manager
        self._codec = codec
        self._placement = Placement.of(settings.engine)
        self._rendezvous = self._placement.rendezvous(spec.endpoints.rendezvous)
        self._queues: tuple[PullQueue, PushQueue] | None = None
        if spec.index == 0:
            places = spec.endpoints
            self._queues = (
                PullQueue(context, places.scheduler, codec),
                PushQueue(context, places.detokenizer, codec),
            )

    def run(self, report: Callable[[WorkerReport], None]) -> None:
        """Start, report, serve.

        Raises:
            MinisglError: The engine cannot be built as the settings say.
        """
        recorder = Recorder.of(self._settings) if self._spec.index == 0 else None
        engine, backends, name = self._meet_and_build(report)
        ends = self._ends(engine)
        if recorder is not None:
            ends = recorder.attach(*ends, backends.names())
        hooks = self._manager.hooks
        on_step = step_observer(hooks) if self._spec.index == 0 else None
        scheduler = build_scheduler(backends, self._settings, *ends, on_step)
        facts = _facts(engine.limits, self._settings)
        report(ReadyMsg(facts, {"model": name, "device": str(engine.device)}))
        try:
            scheduler.run_forever()
            if recorder is not None:
                recorder.close()
        finally:
            engine.shutdown()

    def _meet_and_build(
        self, report: Callable[[WorkerReport], None]
    ) -> tuple[Engine, SchedulerBackends, str]:
        """Build; when that fails, tell the ranks of other nodes, who cannot see it."""
        if self._placement.nnodes == 1:
            return self._build()

        def on_lost() -> None:
            time.sleep(_EXPLAIN_S)  # a rank that is at work finds out by itself, and says more
            report(FailedMsg(CommError.__name__, RANK_ENDED, is_ours=True))
            os._exit(1)

        try:
            return self._build(on_lost)
        except Exception as error:
            call_off_meeting(self._rendezvous, f"rank {self._spec.index}: {error}")
            raise

    def _build(
        self, on_lost: Callable[[], None] | None = None
    ) -> tuple[Engine, SchedulerBackends, str]:
        """Return the engine, what its scheduler is to be made of, and the model's name."""
        files = open_configured(self._settings, self._manager)
        request = EngineRequest(
            self._settings,
            self._manager,
            files,
            eos_token_ids=eos_token_ids(files, files.load_tokenizer()),
            rank=self._spec.index,
            init_method=self._rendezvous,
            on_lost=on_lost,
            show_progress=self._spec.index == 0 and sys.stderr.isatty(),
        )
        backends = SchedulerBackends.resolve(
            self._manager, self._settings, describe_to_probes(request)
        )
        if self._spec.index == 0:
            for line in backends.describe():
                logger.info("%s", line)
        return build_engine(request), backends, files.name

    def _ends(self, engine: Engine) -> tuple[StepEngine, SchedulerIO]:
        """Return the scheduler's engine and its line: on rank 0 the queues, else what it tells."""
        line: SchedulerIO | None = None
        if self._queues is not None:
            line = DeadlineIO(QueueIO(*self._queues))
            on_request = request_observer(self._manager.hooks)
            if on_request is not None:
                line = ObservedIO(line, on_request)
        if line is not None and self._settings.engine.tp == 1:
            return engine, line
        return in_lockstep(engine, engine.comm, line, self._codec)


def _facts(limits: EngineLimits, settings: Settings) -> dict[str, int]:
    """Return what the server has to know; ``max_open_reqs`` only where there is such a limit."""
    facts = {
        "num_pages": limits.num_pages,
        "page_size": limits.page_size,
        "max_running_reqs": limits.max_running_reqs,
        "max_seq_len": limits.max_seq_len,
        "vocab_size": limits.vocab_size,
    }
    config = scheduler_config(settings.scheduler, settings.engine.tp)
    max_open = config.max_open_reqs(limits.max_running_reqs)
    return facts if max_open is None else facts | {"max_open_reqs": max_open}
