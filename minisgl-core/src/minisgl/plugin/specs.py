"""Loading specs, each at most once and each on its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import import_module

from pydantic import BaseModel

from minisgl.errors import PluginError
from minisgl.plugin.discovery import CORE, Offer
from minisgl.plugin.isolation import Failure, contain
from minisgl.plugin.returned import Kinds, check_fields
from minisgl.plugin.spec import PLUGIN_API, BackendSpec, Capabilities

logger = logging.getLogger(__name__)

_FIELDS: Mapping[str, Kinds] = {
    "factory": str,
    "summary": str,
    "aliases": tuple,
    "probe": Callable,  # type: ignore[dict-item]  # isinstance takes it, and mypy calls it a form
    "capabilities": Capabilities,
}


class SpecStore:
    """The specs of a catalog's offers, imported when first asked for; owned by one manager."""

    def __init__(self) -> None:
        """Make an empty store."""
        self._specs: dict[str, BackendSpec] = {}
        self._errors: dict[str, tuple[Offer, PluginError]] = {}

    def load(self, offer: Offer) -> BackendSpec:
        """Return the spec of an offer.

        Raises:
            PluginError: It cannot be imported, is not a spec, or was written for another plugin
                API. The message says what to do and does not name the offer.
        """
        if offer.key in self._errors:
            raise self._errors[offer.key][1]
        if offer.key not in self._specs:
            try:
                self._specs[offer.key] = contain(partial(_checked, load_object(offer), offer))
            except PluginError as error:
                self._errors[offer.key] = (offer, error)
                logger.debug("%s", offer.failure(error), exc_info=error)
                raise
        return self._specs[offer.key]

    def loadable(self, offers: Iterable[Offer]) -> list[tuple[Offer, BackendSpec]]:
        """Return those offers whose spec loads; the others are in `failures` afterwards."""
        found = []
        for offer in offers:
            try:
                found.append((offer, self.load(offer)))
            except PluginError:
                continue
        return found

    def refuse(self, offer: Offer, error: PluginError) -> None:
        """Treat an offer from now on as one whose spec does not load."""
        self._specs.pop(offer.key, None)
        self._errors[offer.key] = (offer, error)

    @property
    def failures(self) -> tuple[Failure, ...]:
        """What has been asked for so far and could not be loaded."""
        return tuple(offer.failure(error) for offer, error in self._errors.values())


def load_object(offer: Offer) -> object:
    """Import what an entry point names.

    Raises:
        PluginError: It cannot be imported; stale metadata are told apart from a broken module.
    """
    point = offer.entry_point
    try:
        return contain(point.load)
    except PluginError as error:
        cause = error.__cause__
        parents = {point.module.rsplit(".", n)[0] for n in range(point.module.count(".") + 1)}
        if isinstance(cause, ModuleNotFoundError) and cause.name in parents:
            raise PluginError(
                f"its metadata name the module {point.module!r}, which is gone; "
                f"reinstall or uninstall {offer.distribution}"
            ) from cause
        if isinstance(cause, AttributeError) and not _has_attribute(point.module, point.attr):
            raise PluginError(
                f"its metadata name {point.value!r}, which is not there; "
                f"reinstall or uninstall {offer.distribution}"
            ) from cause
        raise PluginError(f"{error}; reinstall or uninstall {offer.distribution}") from cause


def _has_attribute(module: str, attribute: str) -> bool:
    """Return whether a module imports and has an attribute."""
    try:
        found = contain(lambda: import_module(module))
    except PluginError:
        return True  # the import itself raised the AttributeError
    return hasattr(found, attribute.split(".")[0])


def _checked(spec: object, offer: Offer) -> BackendSpec:
    """Refuse what is not a spec of this plugin API."""
    if not isinstance(spec, BackendSpec):
        raise PluginError(f"{offer.entry_point.value!r} is not a BackendSpec but {spec!r:.80}")
    if spec.api != PLUGIN_API:
        older, newer = sorted([("the plugin", spec.api), ("the core", PLUGIN_API)], key=_number)
        upgrade = offer.distribution if older[0] == "the plugin" else CORE
        raise PluginError(
            f"written for plugin api {spec.api}, and this {CORE} has api {PLUGIN_API}; "
            f"upgrade {upgrade}, or downgrade {newer[0]}"
        )
    check_fields(spec, _FIELDS)
    if spec.settings is not None and not (
        isinstance(spec.settings, type) and issubclass(spec.settings, BaseModel)
    ):
        raise PluginError(f"its settings are not a pydantic model but {spec.settings!r:.80}")
    if spec.settings is not None:
        check_defaults(spec.settings)
    return spec


def check_defaults(model: type[BaseModel]) -> None:
    """Refuse a section that cannot be left alone: whoever does not use it must not see it.

    Raises:
        PluginError: A field has no default, or one that its own validation refuses.
    """
    try:
        contain(model)
    except PluginError as error:
        raise PluginError(f"its settings cannot be left to their defaults: {error}") from error


def _number(side: tuple[str, int]) -> int:
    return side[1]
