"""Everything that is installed, whether it works here, and what ``auto`` would pick."""

from __future__ import annotations

from dataclasses import dataclass

from minisgl.errors import PluginError
from minisgl.plugin.discovery import KINDS, Offer
from minisgl.plugin.lookup import availability_of
from minisgl.plugin.manager import PluginManager
from minisgl.plugin.spec import (
    SMALL_DECODE_REQS,
    Availability,
    BackendSpec,
    Phase,
    ProbeContext,
)

CHAINED = ("kernels", "source")
"""Kinds of which ``auto`` uses everything that works, in order."""


@dataclass(frozen=True, slots=True)
class Row:
    """One backend as ``minisgl plugins`` shows it.

    Attributes:
        kind: Its kind.
        name: Its name.
        aliases: Its other names.
        distribution: Where it comes from.
        version: Of the distribution.
        summary: What it says about itself.
        is_available: Whether it works here.
        reason: Why not, or what it found.
        priority: By which ``auto`` ranks it, or ``None`` when it is not available.
        auto: What ``auto`` uses it for: empty, ``"picked"``, its place in a chain such as
            ``"1st"``, or the phases ``"prefill"``, ``"decode"``.
    """

    kind: str
    name: str
    aliases: tuple[str, ...]
    distribution: str
    version: str
    summary: str
    is_available: bool
    reason: str
    priority: int | None
    auto: str

    @property
    def key(self) -> str:
        """The offer's key."""
        return f"{self.kind}/{self.distribution}:{self.name}"


def survey(plugins: PluginManager, context: ProbeContext) -> list[Row]:
    """Probe every installed backend for a machine and model.

    Returns:
        Rows by kind, and within a kind in metadata order. A backend whose spec does not load is
        a row with the reason.
    """
    rows = []
    for kind in KINDS:
        uses = _auto_uses(plugins, kind, context)
        offers = [offer for offer in plugins.catalog.offers if offer.kind == kind]
        rows += [_row(plugins, offer, context, uses.get(offer.key, "")) for offer in offers]
    return rows


def _row(plugins: PluginManager, offer: Offer, context: ProbeContext, auto: str) -> Row:
    spec: BackendSpec | None
    try:
        spec = plugins.specs.load(offer)
        answer = _general_availability(offer, spec, context)
    except PluginError as error:
        spec, answer = None, Availability(ok=False, reason=str(error))
    return Row(
        kind=offer.kind,
        name=offer.name,
        aliases=spec.aliases if spec is not None else (),
        distribution=offer.distribution,
        version=offer.version,
        summary=spec.summary if spec is not None else "",
        is_available=answer.ok,
        reason=answer.reason,
        priority=answer.priority if answer.ok else None,
        auto=auto,
    )


def _general_availability(offer: Offer, spec: BackendSpec, context: ProbeContext) -> Availability:
    """Ask about the phases that the backend serves at all."""
    phases: tuple[Phase, ...] = spec.capabilities.phases
    return availability_of(offer, spec, phases, context)


def _auto_uses(plugins: PluginManager, kind: str, context: ProbeContext) -> dict[str, str]:
    """Return what ``auto`` uses each backend of a kind for."""
    try:
        if kind == "model":
            return {}  # the checkpoint names its architecture
        if kind == "attention":
            pair = plugins.resolve_attention("auto", context, is_dry=True)
            is_split = pair.large_decode.key != pair.decode.key
            uses = [(pair.prefill.key, "prefill"), (pair.decode.key, "decode")]
            if is_split:
                uses.append((pair.large_decode.key, f"decode beyond {SMALL_DECODE_REQS}"))
            return {key: ", ".join(use for other, use in uses if other == key) for key, _ in uses}
        if kind in CHAINED:
            chain = plugins.resolve_chain(kind, "auto", context, is_dry=True).chosen
            return {backend.key: _place(index) for index, backend in enumerate(chain, start=1)}
        return {plugins.resolve(kind, "auto", context, is_dry=True).one.key: "picked"}
    except PluginError:
        return {}


def _place(number: int) -> str:
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number, 'th') }"
