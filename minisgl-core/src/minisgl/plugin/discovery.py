"""Which backends and hook plugins are installed, from metadata alone: nothing is imported here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import Distribution, EntryPoint, distributions

from minisgl.errors import PluginError
from minisgl.plugin.isolation import Failure, contain, details_of

CORE = "minisgl-core"
HOOK_GROUP = "minisgl"

KINDS: Mapping[str, str] = {
    "attention": "--attn",
    "cache": "--cache",
    "moe": "--moe",
    "kernels": "--kernels",
    "comm": "--comm",
    "policy": "--policy",
    "source": "--model-source",
    "model": "architecture",
}
"""Every kind of backend, and how the user asks for one; the group is ``minisgl.<kind>``."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class Offer:
    """A backend that a distribution says it has.

    Attributes:
        kind: One of `KINDS`, or `HOOK_GROUP` for a hook plugin.
        name: The entry point's name.
        distribution: Normalised name of the distribution.
        version: Its version.
        entry_point: Where the spec or the hook plugin is.
    """

    kind: str
    name: str
    distribution: str
    version: str
    entry_point: EntryPoint

    @property
    def key(self) -> str:
        """A name that is unique among all offers: ``attention/minisgl-attn-fa:fa``."""
        return f"{self.kind}/{self.distribution}:{self.name}"

    @property
    def subject(self) -> str:
        """What to call it in a message."""
        kind = "hook plugin" if self.kind == HOOK_GROUP else f"{self.kind} backend"
        return f"{kind} {self.name!r}"

    def failure(self, error: PluginError) -> Failure:
        """Describe why this offer cannot be used."""
        return Failure(self.subject, self.distribution, self.version, str(error), details_of(error))


@dataclass(frozen=True, slots=True)
class Catalog:
    """Everything that is installed.

    Attributes:
        offers: Backends of allowed distributions, in ``sys.path`` order.
        hooks: Hook plugins of allowed distributions.
        versions: Version of every distribution that takes part, blocked ones included.
        blocked: Distributions that ``MINISGL_PLUGINS`` leaves out.
        failures: Metadata that could not be used.
    """

    offers: tuple[Offer, ...]
    hooks: tuple[Offer, ...]
    versions: Mapping[str, str]
    blocked: frozenset[str]
    failures: tuple[Failure, ...]


def discover(plugin_list: str = "") -> Catalog:
    """Read the metadata of all installed distributions.

    Args:
        plugin_list: ``MINISGL_PLUGINS``: names of distributions by commas, which leave out all
            others; ``-name`` leaves out one. The core always stays.

    Raises:
        PluginError: The list names a distribution that is not installed or offers nothing, or
            leaves out the core.
    """
    found: dict[str, tuple[str, list[EntryPoint]]] = {}
    failures: list[Failure] = []
    for dist in distributions():
        try:
            entry = contain(partial(_read, dist))
        except PluginError as error:
            place = str(getattr(dist, "_path", "unknown distribution"))
            failures.append(Failure("metadata", place, "", str(error), details_of(error)))
            continue
        if entry is not None:
            # As everywhere in Python, the first on sys.path hides later ones of the same name.
            found.setdefault(entry[0], (entry[1], entry[2]))
    blocked = _blocked(plugin_list, frozenset(found))
    offers: list[Offer] = []
    for name, (version, points) in found.items():
        if name not in blocked:
            offers += _offers(name, version, points, failures)
    return Catalog(
        offers=tuple(offer for offer in offers if offer.kind != HOOK_GROUP),
        hooks=tuple(offer for offer in offers if offer.kind == HOOK_GROUP),
        versions={name: version for name, (version, _) in found.items()},
        blocked=blocked,
        failures=tuple(failures),
    )


def normalize(name: str) -> str:
    """Return a distribution's name in the one spelling that is compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _read(dist: Distribution) -> tuple[str, str, list[EntryPoint]] | None:
    """Return name, version and our entry points of a distribution that has any."""
    # Most distributions are ruled out by this text alone, without parsing their metadata.
    if HOOK_GROUP not in (dist.read_text("entry_points.txt") or ""):
        return None
    groups = {HOOK_GROUP, *(f"{HOOK_GROUP}.{kind}" for kind in KINDS)}
    points = [point for point in dist.entry_points if point.group in groups]
    return (normalize(dist.metadata["Name"]), dist.version, points) if points else None


def _offers(
    distribution: str, version: str, points: list[EntryPoint], failures: list[Failure]
) -> Iterator[Offer]:
    """Turn entry points into offers; unusable names are failures."""
    seen: set[tuple[str, str]] = set()
    for point in points:
        kind = point.group.removeprefix(f"{HOOK_GROUP}.")
        offer = Offer(kind, point.name, distribution, version, point)
        if (kind, point.name) in seen:
            reason = "its metadata names it twice; reinstall the distribution"
        elif not _NAME.fullmatch(point.name) or point.name == "auto":
            reason = "a name has letters, digits, '_', '.' and '-', and is not 'auto'"
        else:
            seen.add((kind, point.name))
            yield offer
            continue
        failures.append(offer.failure(PluginError(reason)))


def _blocked(plugin_list: str, installed: frozenset[str]) -> frozenset[str]:
    """Return the distributions that the list leaves out."""
    entries = [entry.strip() for entry in plugin_list.split(",") if entry.strip()]
    allowed = {normalize(entry) for entry in entries if not entry.startswith("-")}
    denied = {normalize(entry[1:]) for entry in entries if entry.startswith("-")}
    for name in sorted(allowed | denied):
        if name not in installed:
            known = ", ".join(sorted(installed)) or "none"
            raise PluginError(
                f"MINISGL_PLUGINS={plugin_list}: no installed distribution {name!r} offers "
                f"anything; installed: {known}"
            )
    if CORE in denied:
        raise PluginError(f"MINISGL_PLUGINS={plugin_list}: {CORE} cannot be left out")
    others = installed - allowed - {CORE} if allowed else frozenset()
    return frozenset(others | denied)
