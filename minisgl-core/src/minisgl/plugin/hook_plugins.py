"""Loading hook plugins one by one, and calling each on its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from inspect import isclass, isfunction
from typing import Any, TypeVar

import pluggy

from minisgl.errors import PluginError
from minisgl.plugin import hookspecs
from minisgl.plugin.discovery import CORE, Offer
from minisgl.plugin.isolation import Failure, contain
from minisgl.plugin.specs import load_object

logger = logging.getLogger(__name__)

_Taken = TypeVar("_Taken")

SEE_DOCTOR = ", see `minisgl plugins doctor`"
"""Advice where it helps: the doctor loads every hook plugin and asks for subcommands, no more."""


@dataclass(frozen=True, slots=True)
class Implementation:
    """One plugin's function for one hook.

    Attributes:
        offer: Whose it is.
        call: Takes the hook's arguments by keyword.
    """

    offer: Offer
    call: Callable[..., Any]  # Any: each hook has its own result


class HookPlugins:
    """The hook plugins of one process, and what became of those that failed."""

    def __init__(self) -> None:
        """Know the hooks, and no plugin yet."""
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._offers: dict[str, Offer] = {}
        self._failures: list[Failure] = []

    def load(self, offers: Iterable[Offer]) -> None:
        """Import and register hook plugins; one that fails leaves nothing behind but a warning."""
        for offer in offers:
            try:
                plugin = load_object(offer)
                contain(partial(self._register, offer, plugin))
            except PluginError as error:
                self.drop(offer, error, SEE_DOCTOR)

    def drop(self, offer: Offer, error: PluginError, advice: str = "") -> None:
        """Forget a plugin that has failed, and warn; ``advice`` ends the warning."""
        if self._manager.has_plugin(offer.key):
            self._manager.unregister(name=offer.key)
        self._offers.pop(offer.key, None)
        failure = offer.failure(error)
        self._failures.append(failure)
        logger.warning("%s; it is left out%s", failure, advice)
        logger.debug("why %s is left out", offer.name, exc_info=error)

    def implementations(self, hook: str) -> list[Implementation]:
        """Return who implements a hook, in the order in which they are to be called."""
        caller: pluggy.HookCaller = getattr(self._manager.hook, hook)
        found = [
            Implementation(self._offers[impl.plugin_name], _adapted(impl))
            # pluggy keeps what runs first last.
            for impl in reversed(caller.get_hookimpls())
        ]
        # The core's come first, so that nothing that is installed can take a name from it.
        return sorted(found, key=lambda each: each.offer.distribution != CORE)

    def collect(
        self,
        hook: str,
        take: Callable[[Offer, Any], _Taken],
        advice: str = "",
        **arguments: object,
    ) -> list[_Taken]:  # Any: as in Implementation
        """Call a hook of every plugin, and hand over what each returns.

        Args:
            hook: Its name.
            take: Is given the plugin and its result, compares that with what the hook is to return,
                and keeps all of it or, when it raises, none. It is not called for ``None``.
            advice: As for `drop`.
            arguments: Of the hook.

        Returns:
            What ``take`` returned. A plugin whose hook raises, or whose result does, is dropped.
        """
        taken = []
        for each in self.implementations(hook):
            trouble = f"{hook} failed"
            try:
                result = contain(partial(each.call, **arguments))
                trouble = hook
                if result is not None:
                    taken.append(contain(partial(take, each.offer, result)))
            except PluginError as error:
                reason = PluginError(f"{trouble}: {error}")
                reason.__cause__ = error.__cause__
                self.drop(each.offer, reason, advice)
        return taken

    @property
    def loaded(self) -> tuple[Offer, ...]:
        """The plugins that take part."""
        return tuple(self._offers.values())

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The plugins that do not, and why."""
        return tuple(self._failures)

    def _register(self, offer: Offer, plugin: object) -> None:
        """Register a plugin, or raise; the caller takes back what was registered in part."""
        if isclass(plugin):
            raise PluginError(f"{offer.entry_point.value!r} is a class; name a module or an object")
        if unmarked := _unmarked(plugin):
            raise PluginError(f"{unmarked} is not marked with @hookimpl")
        if (other := self._manager.get_name(plugin)) is not None:
            raise PluginError(
                f"{offer.entry_point.value!r} is registered already, as "
                f"{self._offers[other].name!r}; one entry point is enough for all of its hooks"
            )
        self._manager.register(plugin, name=offer.key)
        callers = self._manager.get_hookcallers(plugin) or []
        known = [name for name in dir(hookspecs) if name.startswith("minisgl_")]
        if not callers:
            raise PluginError(f"it implements no hook; known are {', '.join(known)}")
        for caller in callers:
            mine = [impl for impl in caller.get_hookimpls() if impl.plugin is plugin]
            if not caller.has_spec() and not all(impl.optionalhook for impl in mine):
                close = get_close_matches(caller.name, known, n=1)
                hint = f"did you mean {close[0]}" if close else f"known are {', '.join(known)}"
                raise PluginError(f"unknown hook {caller.name}; {hint}")
            if any(impl.wrapper or impl.hookwrapper for impl in mine):
                raise PluginError(f"{caller.name}: wrappers are not supported")
        self._offers[offer.key] = offer


def _unmarked(plugin: object) -> str:
    """Return the name of a function that looks like a hook and is not marked as one."""
    home = getattr(plugin, "__name__", None)
    for name, value in vars(plugin).items() if hasattr(plugin, "__dict__") else ():
        is_own = isfunction(value) and value.__module__ == home
        if name.startswith("minisgl_") and is_own and not hasattr(value, "minisgl_impl"):
            return name
    return ""


def _adapted(impl: pluggy.HookImpl) -> Callable[..., Any]:  # Any: as in Implementation
    """Let a function that takes fewer arguments be called with all of the hook's."""
    names = impl.argnames

    def call(**arguments: object) -> Any:  # Any: as in Implementation
        return impl.function(*(arguments[name] for name in names))

    return call
