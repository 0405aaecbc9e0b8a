"""The entry of every worker process."""

from __future__ import annotations

import logging
import os
import pickle
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import zmq
from tqdm import tqdm

from minisgl.config.load import Settings
from minisgl.errors import MinisglError, log_in_full
from minisgl.message.codec import Codec
from minisgl.message.lifecycle import FailedMsg, ReadyMsg, WorkerReport
from minisgl.message.queues import PullQueue, PushQueue
from minisgl.message.wire import wire_codec
from minisgl.plugin.manager import PluginManager
from minisgl.workers.contract import WorkerSpec
from minisgl.workers.heap import settle_heap
from minisgl.workers.logs import configure_logging
from minisgl.workers.parent import die_with_parent, ignore_terminal_signals, watch_parent

logger = logging.getLogger(__name__)

Report = Callable[[WorkerReport], None]


def run_worker(spec: WorkerSpec, connection: Connection) -> None:
    """Serve until told to stop; the target of each spawned process.

    Ends the process with code 0 after an exit message and with 1 after an error, which has been
    reported over ``connection`` by then.

    Args:
        spec: What to be.
        connection: To the parent; its closing ends this process.
    """
    ignore_terminal_signals()
    configure_logging(spec.log, spec.name)
    # The detokenizer stays alive for a moment to remove the socket folder of a killed parent.
    if spec.role != "detokenizer":
        die_with_parent(spec.parent_pid)
    watch_parent(connection, spec.endpoints.folder)
    # Its own lock is a system-wide semaphore, which outlives a process that is killed.
    tqdm.set_lock(threading.RLock())
    codec = wire_codec()

    def report(message: WorkerReport) -> None:
        if isinstance(message, ReadyMsg):
            settle_heap()
        connection.send_bytes(codec.encode([message]))

    try:
        _serve(spec, codec, report)
    except MinisglError as error:
        log_in_full(logger, error)
        report(FailedMsg(type(error).__name__, str(error), is_ours=True))
        _leave(1)
    except BaseException as error:
        logger.exception("%s failed", spec.name)
        report(FailedMsg(type(error).__name__, str(error), is_ours=False))
        _leave(1)
    _leave(0)


def _serve(spec: WorkerSpec, codec: Codec[object], report: Report) -> None:
    manager = PluginManager.bootstrap()
    manager.settings_tree()  # loads what the pickled settings are made of
    settings = pickle.loads(spec.settings)
    assert isinstance(settings, Settings), "the parent pickles settings"
    context: zmq.Context[Any] = zmq.Context()  # Any: its sockets are of a private type
    try:
        if spec.role == "scheduler":
            # Here, because a tokenizer has no use for the engine.
            from minisgl.workers.scheduler import SchedulerWorker  # noqa: PLC0415

            SchedulerWorker(spec, settings, manager, context, codec).run(report)
        else:
            _serve_text(spec, settings, manager, context, codec, report)
    finally:
        context.destroy()  # closes every queue, also after an error half-way through the start


def _serve_text(
    spec: WorkerSpec,
    settings: Settings,
    manager: PluginManager,
    context: zmq.Context[Any],  # Any: as above
    codec: Codec[object],
    report: Report,
) -> None:
    # Here, because these import torch, which a scheduler wants to do in its own time.
    from minisgl.weights.resolve import open_configured  # noqa: PLC0415
    from minisgl.workers.text import TextWorker  # noqa: PLC0415

    places = spec.endpoints
    is_detokenizer = spec.role == "detokenizer"
    path = places.detokenizer if is_detokenizer else places.tokenizers[spec.index]
    inbox = PullQueue(context, path, codec)
    scheduler = PushQueue(context, places.scheduler, codec)
    server = PushQueue(context, places.server, codec)
    files = open_configured(settings, manager)
    worker = TextWorker(files.load_tokenizer(), inbox, scheduler, server)
    report(ReadyMsg())
    worker.run_forever()


def _leave(code: int) -> None:
    """End at once: threads of libraries have nothing left to say."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
