"""Reading a config.json by way of whoever offers its architecture."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from minisgl.errors import ModelError, PluginError
from minisgl.models.config import ModelConfig, architecture_of, normalize_config
from minisgl.plugin.isolation import contain
from minisgl.plugin.manager import PluginManager
from minisgl.plugin.spec import ConfigAdapter


def read_model_config(config: Mapping[str, Any], plugins: PluginManager) -> ModelConfig:
    """Read a config.json whose architecture may come from any installed distribution.

    Raises:
        ModelError: As for `normalize_config`, or the architecture's own adapter failed.
    """
    names = plugins.names("model")
    architecture = architecture_of(config, names)
    adapt = _adapter(architecture, plugins)
    if adapt is not None:
        try:
            config = contain(partial(adapt, config))
        except PluginError as error:
            if isinstance(error.__cause__, ModelError):
                raise error.__cause__ from error
            raise ModelError(f"config.json: {architecture} cannot read it: {error}") from error
    return normalize_config(config, names)


def _adapter(architecture: str, plugins: PluginManager) -> ConfigAdapter | None:
    """Return what the backend's spec says; one that cannot be had is reported by who picks it."""
    offers = [
        offer
        for offer in plugins.catalog.offers
        if (offer.kind, offer.name) == ("model", architecture)
    ]
    found = plugins.specs.loadable(offers)
    return found[0][1].adapt_config if len(found) == 1 else None
