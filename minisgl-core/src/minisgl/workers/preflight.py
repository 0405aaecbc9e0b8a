"""What can be checked before any worker starts: without torch, and without fetching anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.errors import ModelError, PluginError, SettingsError
from minisgl.layers.shard import split_heads
from minisgl.models.families import FAMILIES
from minisgl.scheduler.record_path import record_path
from minisgl.weights.gguf import GGUFSource
from minisgl.weights.local import LocalSource
from minisgl.weights.resolve import find_configured

if TYPE_CHECKING:
    from minisgl.config.load import Settings
    from minisgl.plugin.manager import PluginManager
    from minisgl.weights.contract import ModelFiles


def check_settings(settings: Settings, manager: PluginManager) -> None:
    """Refuse settings of which it can be seen already that no worker could start with them.

    What passes may still be refused by a worker, which knows the device and all of the model.

    Raises:
        SettingsError: A backend or model is unknown, a file of the model is damaged, the model
            cannot be cut into so many ranks, or a trace cannot be written.
    """
    record_path(settings)
    backends = settings.backends
    choices = {
        "attention": backends.attn,
        "cache": backends.cache,
        "moe": backends.moe,
        "kernels": backends.kernels,
        "comm": backends.comm,
        "policy": backends.policy,
    }
    try:
        for kind, choice in choices.items():
            manager.check_names(kind, choice)
        files = _open_local(settings, manager)
        if files is not None:
            _check_heads(files, settings.engine.tp)
    except (ModelError, PluginError) as error:
        raise SettingsError(str(error)) from error


def _open_local(settings: Settings, manager: PluginManager) -> ModelFiles | None:
    """Find out who opens the model, and open it where it is on this machine."""
    source = find_configured(settings, manager)
    # Other sources fetch what they open.
    is_here = isinstance(source, LocalSource | GGUFSource)
    return source.open(settings.model.model) if is_here else None


def _check_heads(files: ModelFiles, num_ranks: int) -> None:
    """Check the heads of architectures whose configuration is known to be spelt like this."""
    named = files.config.get("architectures")
    if not isinstance(named, list) or not named or named[0] not in FAMILIES:
        return
    num_qo = files.config.get("num_attention_heads")
    num_kv = files.config.get("num_key_value_heads") or num_qo
    if isinstance(num_qo, int) and isinstance(num_kv, int) and num_kv > 0:
        split_heads(num_qo, num_kv, 0, num_ranks)
