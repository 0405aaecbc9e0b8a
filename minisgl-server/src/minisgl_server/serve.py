"""``minisgl serve``: from settings to a running server, and to its end."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from minisgl.config.placement import Placement
from minisgl.errors import SettingsError
from minisgl.message.folder import SocketFolder
from minisgl.message.lifecycle import ReadyMsg
from minisgl.plugin.commands import CommandContext
from minisgl.workers.contract import Endpoints, LogOptions
from minisgl.workers.logs import configure_logging
from minisgl.workers.preflight import check_settings
from minisgl_server import follow
from minisgl_server.api.app import create_app
from minisgl_server.api.plugin_routes import add_plugin_routes
from minisgl_server.chat import command as chat
from minisgl_server.engine_client import EngineClient, EngineFacts
from minisgl_server.http_server import HttpServer
from minisgl_server.interrupts import EXIT_INTERRUPTED, Interrupts
from minisgl_server.listener import Listener
from minisgl_server.metrics import Metrics
from minisgl_server.processes import WorkerGroup
from minisgl_server.settings import ServerSettings
from minisgl_server.state import ServerState

if TYPE_CHECKING:
    from minisgl.config.load import Settings

logger = logging.getLogger(__name__)

_EXIT_TIMEOUT_S = 10.0


def run(context: CommandContext) -> int:
    """Serve until told to stop.

    Returns:
        0 after SIGTERM or Ctrl-C, 1 when a worker died, 130 when it was interrupted before it was
        ready.

    Raises:
        SettingsError: A setting cannot be met; most are refused before a worker starts.
        MinisglError: A worker could not start; the error is its own.
    """
    if context.arguments.shell:
        return chat.run(context)
    settings = context.filled_settings
    own = settings.section(ServerSettings)
    log = LogOptions(own.log_level.upper(), own.log_format)
    placement = Placement.of(settings.engine)
    configure_logging(log, "server" if placement.is_first else f"node {placement.node_rank}")
    if not placement.is_first:
        return follow.run(settings, log)
    started_s = time.monotonic()
    template = _read_template(own)
    with ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts())
        listener = Listener(own)
        stack.callback(listener.close)
        if placement.nnodes == 1:  # else the other nodes hear of it by ranks that start and fail
            check_settings(settings, context.plugins)
        if interrupts.is_asked:
            return EXIT_INTERRUPTED
        parts = _launch(settings, log, listener, interrupts, stack)
        ready = parts.group.wait_until_ready(own.startup_timeout_s, lambda: interrupts.is_asked)
        if interrupts.is_asked:
            return EXIT_INTERRUPTED
        state = _state(context, parts, _facts(ready["scheduler 0"]), template)
        app = create_app(state)
        add_plugin_routes(app, context.plugins.hooks)
        _announce(state, time.monotonic() - started_s)
        code = HttpServer(app, state, listener, parts.group, interrupts).run()
        if parts.client.failure is None:
            parts.client.send_exit()
            parts.group.stop(_EXIT_TIMEOUT_S)
        return code


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a server has besides its application; ends with the stack that it was put on."""

    metrics: Metrics
    client: EngineClient
    group: WorkerGroup


def _launch(
    settings: Settings,
    log: LogOptions,
    listener: Listener,
    interrupts: Interrupts,
    stack: ExitStack,
) -> _Parts:
    """Start the workers; each part is taken back when ``stack`` unwinds."""
    folder = stack.enter_context(SocketFolder())
    endpoints = Endpoints(folder.path, settings.section(ServerSettings).num_tokenizer)
    metrics = Metrics()
    client = EngineClient(endpoints, metrics)
    stack.callback(client.close)
    group = WorkerGroup(settings, endpoints, log)
    stack.callback(group.kill)
    interrupts.last_acts += [listener.close, folder.remove, group.kill]
    return _Parts(metrics, client, group)


def _state(
    context: CommandContext, parts: _Parts, facts: EngineFacts, template: str | None
) -> ServerState:
    """Put together what the routes share."""
    settings = context.filled_settings
    own = settings.section(ServerSettings)
    state = ServerState(
        settings=own,
        client=parts.client,
        facts=facts,
        metrics=parts.metrics,
        names=_names(own, settings, facts),
        versions=dict(context.plugins.catalog.versions),
        chat_template=template,
        created=int(time.time()),
    )
    parts.metrics.set_model(state.names[0])
    return state


def _facts(ready: ReadyMsg) -> EngineFacts:
    return EngineFacts(model=ready.texts["model"], device=ready.texts["device"], **ready.facts)


def _names(own: ServerSettings, settings: Settings, facts: EngineFacts) -> tuple[str, ...]:
    """Return what clients may call the model."""
    if own.served_model_name:
        return own.served_model_name
    return tuple(dict.fromkeys([settings.model.model, facts.model]))


def _read_template(own: ServerSettings) -> str | None:
    if own.chat_template is None:
        return None
    try:
        return Path(own.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"--chat-template {own.chat_template}: cannot be read: {error}"
        ) from error


def _announce(state: ServerState, seconds: float) -> None:
    facts = state.facts
    logger.info(
        "%s on %s: %d KV pages of %d tokens, requests of up to %d tokens, %d at once; "
        "started in %.1f s",
        state.names[0],
        facts.device,
        facts.num_pages,
        facts.page_size,
        facts.max_seq_len,
        facts.max_running_reqs,
        seconds,
    )
