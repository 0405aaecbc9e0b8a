"""Finding the backend that a name means, or all that work, the best first."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from minisgl.errors import PluginError
from minisgl.plugin.capabilities import missing_capability
from minisgl.plugin.discovery import CORE, KINDS, Catalog, Offer, normalize
from minisgl.plugin.isolation import contain
from minisgl.plugin.returned import check_fields
from minisgl.plugin.selection import Refusal, SelectedBackend
from minisgl.plugin.spec import Availability, BackendSpec, Phase, ProbeContext
from minisgl.plugin.specs import SpecStore

logger = logging.getLogger(__name__)

KNOWN_DISTRIBUTIONS: Mapping[tuple[str, str], str] = {
    ("attention", "fa"): "minisgl-attn-fa",
    ("attention", "fi"): "minisgl-attn-flashinfer",
    ("kernels", "cuda"): "minisgl-kernels-cuda",
    ("kernels", "fi"): "minisgl-attn-flashinfer",
    ("moe", "fused"): "minisgl-moe-triton",
}
"""Who could offer a name that is not installed, for error messages."""


@dataclass(frozen=True, slots=True)
class Request:
    """One thing to resolve.

    Attributes:
        kind: Kind of backend.
        choice: All that the user typed, for messages.
        context: Machine and model.
        is_dry: Look only: import no factory.
    """

    kind: str
    choice: str
    context: ProbeContext
    is_dry: bool

    @property
    def flag(self) -> str:
        """How the user asks for this kind."""
        return KINDS[self.kind]

    def error(self, message: str) -> PluginError:
        """Make an error that starts with what the user typed."""
        return PluginError(f"{self.flag} {self.choice}: {message}")

    def elements(self) -> list[str]:
        """Split the choice at its commas.

        Raises:
            PluginError: A part is empty.
        """
        parts = [part.strip() for part in self.choice.split(",")]
        if not all(parts):
            raise self.error("must be names separated by single commas")
        return list(dict.fromkeys(parts)) if self.kind != "attention" else parts


class Lookup:
    """Names and ranks over one catalog."""

    def __init__(self, catalog: Catalog, specs: SpecStore) -> None:
        """Look into ``catalog``; ``specs`` keeps what was loaded."""
        self._catalog = catalog
        self._specs = specs
        self._warned: set[str] = set()

    def named(self, request: Request, part: str, phases: tuple[Phase, ...]) -> SelectedBackend:
        """Resolve one name that the user typed; never anything else in its place."""
        offer = self._find(request, part)
        where = f"{offer.name} of {offer.distribution} {offer.version}"
        try:
            spec = self._specs.load(offer)
        except PluginError as error:
            raise request.error(f"{where}: {error}") from error.__cause__
        availability = availability_of(offer, spec, phases, request.context)
        if not availability.ok:
            raise request.error(f"{where} does not work here: {availability.reason}")
        return _selected(offer, spec, availability, is_named=True)

    def check_names(self, request: Request) -> None:
        """Refuse names that mean nothing, or too much; ``auto`` may be among them.

        Raises:
            PluginError: As for `named`; whether a backend works here is not looked at.
        """
        for part in request.elements():
            if part != "auto":
                self._find(request, part)

    def _find(self, request: Request, part: str) -> Offer:
        """Find the one offer that a name means.

        Raises:
            PluginError: There is none, or there are several.
        """
        distribution, _, name = part.rpartition(":")
        offers = [offer for offer in self._catalog.offers if offer.kind == request.kind]
        if distribution:
            wanted = normalize(distribution)
            offers = [offer for offer in offers if offer.distribution == wanted]
            if not offers:
                raise request.error(
                    f"no installed distribution {distribution!r} offers {request.kind} backends"
                )
        found = [offer for offer in offers if offer.name == name]
        if not found:
            # Aliases are in the specs, so only an unknown name makes others be looked at.
            known = self._specs.loadable(offers)
            found = [offer for offer, spec in known if name in spec.aliases]
        if len(found) == 1:
            return found[0]
        raise request.error(self._not_one(request.kind, name, found))

    def _not_one(self, kind: str, name: str, found: list[Offer]) -> str:
        """Say that a name means nothing, or too much, and what would do."""
        if found:
            who = " and ".join(f"{offer.distribution} {offer.version}" for offer in found)
            picks = " or ".join(f"{offer.distribution}:{offer.name}" for offer in found)
            return f"{who} both offer {name!r}; say {picks}"
        installed = sorted({o.name for o in self._catalog.offers if o.kind == kind})
        message = (
            f"no installed plugin offers {name!r}; installed: {', '.join(installed) or 'none'}"
        )
        provider = KNOWN_DISTRIBUTIONS.get((kind, name), "")
        if provider in self._catalog.blocked:
            return f"{message}; {provider} offers it, and MINISGL_PLUGINS leaves it out"
        can = [
            f"{known} (pip install {provider})"
            for (each, known), provider in KNOWN_DISTRIBUTIONS.items()
            if each == kind and known not in installed
        ]
        return f"{message}; can be installed: {', '.join(can)}" if can else message

    def ranked(
        self, request: Request, phases: tuple[Phase, ...]
    ) -> tuple[list[SelectedBackend], list[Refusal]]:
        """Return everything of a kind that works here, the best first, and what does not."""
        usable: list[SelectedBackend] = []
        refused: list[Refusal] = []
        for offer in self._catalog.offers:
            if offer.kind != request.kind:
                continue
            try:
                spec = self._specs.load(offer)
            except PluginError as error:
                self._warn_once(request, offer, error)
                refused.append(Refusal(offer.name, offer.distribution, str(error)))
                continue
            availability = availability_of(offer, spec, phases, request.context)
            if availability.ok:
                usable.append(_selected(offer, spec, availability, is_named=False))
            else:
                refused.append(Refusal(offer.name, offer.distribution, availability.reason))
        return sorted(usable, key=rank_of), refused

    def _warn_once(self, request: Request, offer: Offer, error: PluginError) -> None:
        """Warn of a broken plugin that ``auto`` passes over; several kinds of it warn once each."""
        if offer.key not in self._warned:
            self._warned.add(offer.key)
            failure = offer.failure(error)
            logger.warning("%s %s: passed over: %s", request.flag, request.choice, failure)


def availability_of(
    offer: Offer, spec: BackendSpec, phases: tuple[Phase, ...], context: ProbeContext
) -> Availability:
    """Ask the probe, then compare capabilities; a probe that raises means no.

    The probe speaks first because its reasons (no GPU, library missing) say more.
    """
    if offer.kind == "attention" and len(phases) == 1:
        context = replace(context, phase=phases[0])
    try:
        answer = contain(partial(spec.probe, context))
    except PluginError as error:
        return Availability(ok=False, reason=f"its probe failed: {error}")
    if not isinstance(answer, Availability):
        return Availability(ok=False, reason=f"its probe returned {answer!r:.80}")
    try:
        check_fields(answer, {"ok": bool, "reason": str, "priority": int})
    except PluginError as error:
        return Availability(ok=False, reason=f"its probe returned an answer whose {error}")
    if answer.ok and offer.kind == "attention":
        reason = missing_capability(answer.capabilities or spec.capabilities, phases, context)
        if reason:
            return replace(answer, ok=False, reason=reason)
    return answer


def _selected(
    offer: Offer, spec: BackendSpec, availability: Availability, *, is_named: bool
) -> SelectedBackend:
    return SelectedBackend(
        kind=offer.kind,
        name=offer.name,
        distribution=offer.distribution,
        version=offer.version,
        spec=spec,
        availability=availability,
        is_named=is_named,
    )


def rank_of(backend: SelectedBackend) -> tuple[int, bool, str]:
    """Order by priority; among equals the core's come first, so that installing changes nothing."""
    is_foreign = backend.distribution != CORE
    return -backend.availability.priority, is_foreign, backend.name
