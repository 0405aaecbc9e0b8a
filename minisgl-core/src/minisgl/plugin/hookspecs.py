"""The hooks: how an installed distribution takes part in what the engine does.

A hook plugin is a module (or an object) that an entry point of the group ``minisgl`` names. It
marks its functions with `hookimpl`::

    # pyproject.toml:  [project.entry-points.minisgl]   metrics = "my_metrics.plugin"
    from minisgl.plugin.hookspecs import hookimpl

    @hookimpl
    def minisgl_step_finished(step):
        histogram.observe(step.duration_s)

A function may take fewer arguments than the hook has. Every hook plugin loads alone: one that
fails is a warning and is listed by ``minisgl plugins doctor``. One whose hook raises, or returns
anything but a list of what the hook says, or ``None`` for nothing, is left out with a warning.
Hooks run at start or once per step, never per layer or token; one that nobody implements costs
nothing. Wrappers are not supported.
"""

from __future__ import annotations

from collections.abc import Sequence

import pluggy

from minisgl.plugin.commands import Subcommand
from minisgl.plugin.records import EngineInfo, LogitsProcessor, RequestRecord, StepRecord

PROJECT = "minisgl"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def minisgl_subcommands() -> Sequence[Subcommand]:  # type: ignore[empty-body]  # a specification
    """Offer subcommands of ``minisgl``.

    Called once per process, at start. A name that is taken is an error of the later plugin, and
    the core comes first. A function of a subcommand that raises ends that subcommand alone, with an
    error that names the plugin.
    """


@hookspec
def minisgl_server_routes() -> Sequence[object]:  # type: ignore[empty-body]  # a specification
    """Offer HTTP routes: objects that Starlette's router takes, such as ``Route`` or ``Mount``.

    Called once, in the process of the API server, before it listens. A route that no request could
    reach, because the server's or another plugin's takes them all, is an error of its plugin.
    """


@hookspec
def minisgl_logits_processors(  # type: ignore[empty-body]  # a specification
    engine: EngineInfo,
) -> Sequence[LogitsProcessor]:
    """Offer logits processors, which run in the order in which they are returned.

    Called once per engine process, just before the engine is made. A processor that raises fails
    the step: unlike an observer it is part of what the user asked for. The step's requests are then
    computed one by one, and those with which it raises again end with an error that names the
    plugin; with several tensor-parallel ranks, which must not part ways, the engine ends with it.
    """


@hookspec
def minisgl_engine_ready(engine: EngineInfo) -> None:
    """Observe that an engine has started; called once per engine process."""


@hookspec
def minisgl_step_finished(step: StepRecord) -> None:
    """Observe a finished step; called on rank 0, on the scheduler's thread.

    What it does delays the next step. An observer that raises is reported once and dropped.
    """


@hookspec
def minisgl_request_finished(request: RequestRecord) -> None:
    """Observe a finished request; called on rank 0, on the scheduler's thread, exactly once each.

    An observer that raises is reported once and dropped.
    """
