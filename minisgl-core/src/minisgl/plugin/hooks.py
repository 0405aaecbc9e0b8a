"""The hooks as typed functions: the only way in which the engine and the server call them.

Observers are resolved once, at start: where nobody observes the result is ``None``, and the step
loop skips even making the record.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from minisgl.errors import PluginError
from minisgl.plugin.hook_plugins import HookPlugins, Implementation
from minisgl.plugin.isolation import contain
from minisgl.plugin.records import EngineInfo, LogitsProcessor, RequestRecord, StepRecord

logger = logging.getLogger(__name__)

_Record = TypeVar("_Record")


class Notifier(Generic[_Record]):
    """Tells observers; one that raises is reported once and not told again."""

    def __init__(self, hook: str, argument: str, observers: list[Implementation]) -> None:
        """Tell ``observers`` of ``hook`` by the keyword ``argument``."""
        self._hook = hook
        self._argument = argument
        self._observers = observers

    def __call__(self, record: _Record) -> None:
        """Tell everyone."""
        for observer in tuple(self._observers):
            try:
                contain(partial(observer.call, **{self._argument: record}))
            except PluginError as error:
                self._observers.remove(observer)
                failure = observer.offer.failure(error)
                logger.warning("%s: %s; it is not told again", self._hook, failure)
                logger.debug("what the observer raised", exc_info=error)


def server_routes(hooks: HookPlugins) -> list[object]:
    """Return all HTTP routes of hook plugins."""
    results = hooks.collect("minisgl_server_routes")
    return [route for _, routes in results for route in routes]


def logits_processors(hooks: HookPlugins, engine: EngineInfo) -> tuple[LogitsProcessor, ...]:
    """Return all logits processors, in the order in which they run; usually none."""
    results = hooks.collect("minisgl_logits_processors", engine=engine)
    return tuple(processor for _, processors in results for processor in processors)


def notify_engine_ready(hooks: HookPlugins, engine: EngineInfo) -> None:
    """Tell observers that an engine has started."""
    hooks.collect("minisgl_engine_ready", engine=engine)


def step_observer(hooks: HookPlugins) -> Callable[[StepRecord], None] | None:
    """Return what to call after each step, or ``None`` when nobody observes."""
    found = hooks.implementations("minisgl_step_finished")
    return Notifier[StepRecord]("minisgl_step_finished", "step", found) if found else None


def request_observer(hooks: HookPlugins) -> Callable[[RequestRecord], None] | None:
    """Return what to call after each request, or ``None`` when nobody observes."""
    found = hooks.implementations("minisgl_request_finished")
    return Notifier[RequestRecord]("minisgl_request_finished", "request", found) if found else None
