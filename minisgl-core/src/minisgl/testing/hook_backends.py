"""Logits processors as something that can be tested: found by the name of their hook plugin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

from minisgl.errors import PluginError
from minisgl.plugin.discovery import Catalog, Offer, normalize
from minisgl.plugin.hook_plugins import HookPlugins
from minisgl.plugin.records import EngineInfo, LogitsProcessor

HOOK_KIND = "logits_processor"
"""The kind under which hook plugins are tested that offer logits processors."""

HOOK = "minisgl_logits_processors"

MakeProcessors = Callable[[EngineInfo], Sequence[LogitsProcessor]]
"""What is tested: the hook, as a function of the engine."""


class HookBackends:
    """The installed hook plugins that offer logits processors."""

    def __init__(self, catalog: Catalog) -> None:
        """Look into ``catalog``."""
        self._offers = catalog.hooks

    def names(self) -> list[str]:
        """Return a name for each plugin that has the hook.

        Raises:
            PluginError: There is none.
        """
        found = HookPlugins()
        found.load(self._offers)
        names = [
            f"{each.offer.distribution}:{each.offer.name}" for each in found.implementations(HOOK)
        ]
        if not names:
            raise PluginError(f"--backend {HOOK_KIND}: no installed hook plugin has {HOOK}")
        return names

    def find(self, name: str) -> tuple[Offer, MakeProcessors]:
        """Load the one hook plugin that a name means.

        Args:
            name: Its entry point's name, its distribution's, or ``distribution:name``.

        Returns:
            The plugin and its hook.

        Raises:
            PluginError: There is none, there are several, or it does not load or lacks the hook.
        """
        where = f"--backend {HOOK_KIND}:{name}"
        offers = [offer for offer in self._offers if _is_meant(offer, name)]
        if not offers:
            known = ", ".join(sorted(offer.name for offer in self._offers)) or "none"
            raise PluginError(f"{where}: no hook plugin is called that; installed: {known}")
        plugins = HookPlugins()
        plugins.load(offers)
        if plugins.failures:
            raise PluginError(f"{where}: {plugins.failures[0]}")
        found = plugins.implementations(HOOK)
        if not found:
            raise PluginError(f"{where}: it has no {HOOK}")
        if len(found) > 1:
            picks = " or ".join(f"{each.offer.distribution}:{each.offer.name}" for each in found)
            raise PluginError(f"{where}: means several hook plugins; say {picks}")
        call = found[0].call
        return found[0].offer, lambda engine: call(engine=engine)


def call_with_engine(hook: Callable[..., Any]) -> MakeProcessors:  # Any: see MakeProcessors
    """Let a function that may leave out the hook's argument be called with it."""
    return hook if signature(hook).parameters else lambda engine: hook()


def _is_meant(offer: Offer, name: str) -> bool:
    distribution, _, short = name.rpartition(":")
    if distribution:
        return offer.distribution == normalize(distribution) and offer.name == short
    return name == offer.name or normalize(name) == offer.distribution
