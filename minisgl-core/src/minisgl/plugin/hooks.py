"""The hooks as typed functions: the only way in which the engine and the server call them.

Observers are resolved once, at start: where nobody observes the result is ``None``, and the step
loop skips even making the record.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from minisgl.errors import PluginError, ProcessorError
from minisgl.plugin.commands import Subcommand
from minisgl.plugin.discovery import Offer
from minisgl.plugin.hook_plugins import SEE_DOCTOR, HookPlugins, Implementation
from minisgl.plugin.isolation import contain
from minisgl.plugin.records import EngineInfo, LogitsProcessor, RequestRecord, StepRecord
from minisgl.plugin.returned import check_items, check_subcommand

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.core import Req

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


class NamedProcessor:
    """A logits processor that says whose it is when it raises."""

    def __init__(self, offer: Offer, processor: LogitsProcessor) -> None:
        """Run ``processor``, which ``offer`` brought."""
        self._offer = offer
        self._processor = processor

    def __call__(self, logits: Tensor, reqs: Sequence[Req]) -> None:
        """Change rows in place; see `LogitsProcessor`.

        Raises:
            ProcessorError: It raised; the message names the plugin, the cause is attached.
        """
        try:
            contain(partial(self._processor, logits, reqs))
        except PluginError as error:
            reason = PluginError(f"its logits processor failed: {error}")
            raise ProcessorError(str(self._offer.failure(reason))) from error.__cause__


def subcommands(hooks: HookPlugins, add: Callable[[Offer, tuple[Subcommand, ...]], None]) -> None:
    """Hand each plugin's subcommands to ``add``; a plugin whose commands it refuses is left out."""

    def take(offer: Offer, result: object) -> None:
        commands = check_items(result, "Subcommand", lambda item: isinstance(item, Subcommand))
        for command in commands:
            check_subcommand(command)
        add(offer, commands)

    hooks.collect("minisgl_subcommands", take, SEE_DOCTOR)


def server_routes(
    hooks: HookPlugins,
    route: type = object,
    add: Callable[[tuple[Any, ...]], None] | None = None,  # Any: instances of route
) -> list[object]:
    """Return the HTTP routes of hook plugins.

    Args:
        hooks: The hook plugins.
        route: What the server's router takes; a plugin that offers anything else is left out.
        add: Keeps all routes of one plugin, or raises a `PluginError` and keeps none; then the
            plugin is left out.
    """

    def take(offer: Offer, result: object) -> tuple[object, ...]:
        del offer
        routes = check_items(result, "route", lambda item: isinstance(item, route))
        if add is not None:
            add(routes)
        return routes

    return [each for routes in hooks.collect("minisgl_server_routes", take) for each in routes]


def logits_processors(hooks: HookPlugins, engine: EngineInfo) -> tuple[LogitsProcessor, ...]:
    """Return all logits processors, in the order in which they run; usually none."""

    def take(offer: Offer, result: object) -> list[LogitsProcessor]:
        found = check_items(result, "function", callable)
        return [NamedProcessor(offer, processor) for processor in found]

    results = hooks.collect("minisgl_logits_processors", take, engine=engine)
    return tuple(processor for processors in results for processor in processors)


def notify_engine_ready(hooks: HookPlugins, engine: EngineInfo) -> None:
    """Tell observers that an engine has started."""

    def take(offer: Offer, result: object) -> None:
        del offer, result  # an observer has nothing to say

    hooks.collect("minisgl_engine_ready", take, engine=engine)


def step_observer(hooks: HookPlugins) -> Callable[[StepRecord], None] | None:
    """Return what to call after each step, or ``None`` when nobody observes."""
    found = hooks.implementations("minisgl_step_finished")
    return Notifier[StepRecord]("minisgl_step_finished", "step", found) if found else None


def request_observer(hooks: HookPlugins) -> Callable[[RequestRecord], None] | None:
    """Return what to call after each request, or ``None`` when nobody observes."""
    found = hooks.implementations("minisgl_request_finished")
    return Notifier[RequestRecord]("minisgl_request_finished", "request", found) if found else None
