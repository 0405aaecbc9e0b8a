"""The settings sections of installed backends: prefixed by the backend's name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pydantic import BaseModel

from minisgl.config.sections import CORE_SECTIONS
from minisgl.config.tree import Section
from minisgl.plugin.discovery import Offer
from minisgl.plugin.spec import BackendSpec


def plugin_sections(backends: Iterable[tuple[Offer, BackendSpec]]) -> list[Section]:
    """Make the sections of backends that have settings.

    The prefix is the backend's name. Backends of several kinds that share a name and a model
    share the section. Where one name stands for different models, or is also the name of a core
    setting, each gets a longer prefix: ``kind-name``, or ``distribution-name`` within a kind.
    """
    owners: dict[tuple[str, type[BaseModel]], list[Offer]] = {}
    for offer, spec in backends:
        if spec.settings is not None:
            owners.setdefault((offer.name, spec.settings), []).append(offer)
    names = Counter(name for name, _ in owners)
    taken = {name for model in CORE_SECTIONS for name in model.model_fields}
    kinds = Counter((name, offers[0].kind) for (name, _), offers in owners.items())
    sections = []
    for (name, model), offers in owners.items():
        key, first = name, offers[0]
        if names[name] > 1 or name in taken:
            is_within_kind = kinds[name, first.kind] > 1
            key = f"{first.distribution if is_within_kind else first.kind}-{name}"
        sections.append(Section(model, key=key, owners=tuple(offer.key for offer in offers)))
    return sections
