"""One tensor-parallel rank: an engine and its scheduler."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import zmq

from minisgl.config.load import Settings
from minisgl.engine.build import EngineRequest, build_engine
from minisgl.engine.contract import StepEngine
from minisgl.engine.engine import Engine
from minisgl.message.codec import Codec
from minisgl.message.lifecycle import ReadyMsg, WorkerReport
from minisgl.message.queues import PullQueue, PushQueue
from minisgl.plugin.hooks import request_observer, step_observer
from minisgl.plugin.manager import PluginManager
from minisgl.scheduler.build import SchedulerBackends, build_scheduler
from minisgl.scheduler.io import DeadlineIO, ObservedIO, SchedulerIO
from minisgl.scheduler.lockstep import in_lockstep
from minisgl.scheduler.queue_io import QueueIO
from minisgl.tokenizer.eos import eos_token_ids
from minisgl.weights.resolve import open_model
from minisgl.workers.contract import WorkerSpec

logger = logging.getLogger(__name__)


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
        backends = SchedulerBackends.resolve(self._manager, self._settings)
        if self._spec.index == 0:
            for line in backends.describe():
                logger.info("%s", line)
        engine, name = self._build_engine()
        hooks = self._manager.hooks
        scheduler = build_scheduler(
            backends,
            self._settings,
            *self._ends(engine),
            step_observer(hooks) if self._spec.index == 0 else None,
        )
        limits = engine.limits
        facts = {
            "num_pages": limits.num_pages,
            "page_size": limits.page_size,
            "max_running_reqs": limits.max_running_reqs,
            "max_seq_len": limits.max_seq_len,
            "vocab_size": limits.vocab_size,
        }
        report(ReadyMsg(facts, {"model": name, "device": str(engine.device)}))
        try:
            scheduler.run_forever()
        finally:
            engine.shutdown()

    def _build_engine(self) -> tuple[Engine, str]:
        model = self._settings.model
        files = open_model(
            model.model,
            model.model_source,
            self._manager,
            revision=model.revision,
            settings_of=self._settings.plugin,
        )
        request = EngineRequest(
            self._settings,
            self._manager,
            files,
            eos_token_ids=eos_token_ids(files, files.load_tokenizer()),
            rank=self._spec.index,
            init_method=self._spec.endpoints.rendezvous,
            show_progress=self._spec.index == 0 and sys.stderr.isatty(),
        )
        return build_engine(request), files.name

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
