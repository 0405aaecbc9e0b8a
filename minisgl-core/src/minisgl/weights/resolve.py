"""From what the user typed after ``--model`` to an opened model."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING

from minisgl.errors import ModelError
from minisgl.plugin.spec import ProbeContext
from minisgl.weights.contract import ModelFiles, ModelSource, SourceConfig
from minisgl.weights.user_path import user_path

if TYPE_CHECKING:
    from collections.abc import Callable

    from pydantic import BaseModel

    from minisgl.config.load import Settings
    from minisgl.plugin.manager import PluginManager

AUTO = "auto"


def open_configured(settings: Settings, manager: PluginManager) -> ModelFiles:
    """Find and open the model that settings name.

    Raises:
        PluginError: There is no such source.
        ModelError: No source accepts the model, or it cannot be opened.
    """
    return find_configured(settings, manager).open(settings.model.model)


def find_configured(settings: Settings, manager: PluginManager) -> ModelSource:
    """Return what `open_configured` would open the model with; nothing is opened or fetched.

    Raises:
        PluginError: There is no such source.
        ModelError: No source accepts the model.
    """
    named = settings.model
    return find_source(
        named.model,
        named.model_source,
        manager,
        revision=named.revision,
        settings_of=settings.plugin,
    )


def open_model(model: str, source: str, manager: PluginManager) -> ModelFiles:
    """Find and open a model, with no settings; see `find_source`."""
    return find_source(model, source, manager).open(model)


def find_source(
    model: str,
    source: str,
    manager: PluginManager,
    *,
    revision: str | None = None,
    settings_of: Callable[[str], BaseModel | None] | None = None,
) -> ModelSource:
    """Find who opens a model.

    Args:
        model: What the user typed.
        source: Name of a model source, several by commas, or ``auto`` for all that are installed.
            A single name is asked to open the model whatever it looks like; of several the first
            that accepts it is.
        manager: Knows the sources.
        revision: Branch, tag or commit.
        settings_of: Returns the settings section of a backend by its key (``settings.plugin``).

    Raises:
        PluginError: There is no such source.
        ModelError: No source accepts the model.
    """
    if not model:
        raise ModelError("--model: is empty; name a folder, a .gguf file, a hub id or demo")
    # A probe hears nothing of device and dtype: the dtype is that of the model which is yet to be
    # found, and tokenizer processes, which have no device, must find the same one.
    chosen = manager.resolve_chain("source", source, ProbeContext()).chosen
    for backend in chosen:
        settings = settings_of(backend.key) if settings_of is not None else None
        opener: ModelSource = backend.build(SourceConfig(settings, revision), ModelSource)
        if (len(chosen) == 1 and source != AUTO) or opener.accepts(model):
            return opener
    raise ModelError(explain_unknown(model, [backend.name for backend in chosen]))


def explain_unknown(model: str, sources: list[str]) -> str:
    """Say where a model was looked for, and what may have been meant."""
    path = user_path(model)
    if path is None:
        return f"--model {model!r:.80}: is neither a path nor a hub id"
    full = path if path.is_absolute() else Path.cwd() / path
    parts = [f"--model {model}: there is no folder {full}"]
    if path.is_file():
        parts = [f"--model {model}: is a file, but not a .gguf one"]
    elif similar := _similar(full):
        parts.append(f"did you mean {similar}?")
    parts.append(f"sources asked: {', '.join(sources) or 'none'}")
    parts.append("hub ids are owner/name (--model-source hub if that is also a path)")
    return "; ".join(parts)


def _similar(full: Path) -> str | None:
    """Return an existing neighbour of about the same name."""
    if not full.parent.is_dir():
        return None
    names = [entry.name for entry in full.parent.iterdir()]
    close = difflib.get_close_matches(full.name, names, n=1, cutoff=0.75)
    return str(full.parent / close[0]) if close else None
