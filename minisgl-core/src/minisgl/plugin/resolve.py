"""From what the user typed to backends: names, pairs, chains and ``auto``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from minisgl.errors import PluginError
from minisgl.plugin.capabilities import page_sizes_of, shared_page_size
from minisgl.plugin.lookup import Lookup, Request, rank_of
from minisgl.plugin.selection import AttentionSelection, Refusal, SelectedBackend, Selection
from minisgl.plugin.spec import SMALL_DECODE_REQS, Phase

logger = logging.getLogger(__name__)

AUTO = "auto"
BOTH_PHASES: tuple[Phase, ...] = ("prefill", "decode")


class Resolver:
    """Resolution over one catalog."""

    def __init__(self, lookup: Lookup) -> None:
        """Resolve what ``lookup`` finds."""
        self._lookup = lookup

    def single(self, request: Request) -> Selection:
        """Resolve a kind that takes one backend; see `PluginManager.resolve`."""
        parts = request.elements()
        if len(parts) != 1:
            raise request.error(f"takes one name; the kind {request.kind!r} does not chain")
        if parts[0] != AUTO:
            chosen = self._lookup.named(request, parts[0], BOTH_PHASES)
            return Selection(request.kind, request.choice, (chosen,), ())
        ranked, refused = self._lookup.ranked(request, BOTH_PHASES)
        for index, backend in enumerate(ranked):
            if refusal := _unloadable(request, backend):
                refused.append(refusal)
                continue
            others = [_outranked(other, backend) for other in ranked[index + 1 :]]
            refusals = (*refused, *others)
            return Selection(request.kind, request.choice, (backend,), refusals)
        raise request.error(_nothing_works(refused))

    def chain(self, request: Request) -> Selection:
        """Resolve a kind that takes several in order; see `PluginManager.resolve_chain`."""
        chosen: dict[str, SelectedBackend] = {}
        refused: list[Refusal] = []
        for part in request.elements():
            if part != AUTO:
                backend = self._lookup.named(request, part, BOTH_PHASES)
                chosen.setdefault(backend.key, backend)
                continue
            ranked, others = self._lookup.ranked(request, BOTH_PHASES)
            refused += others
            for backend in ranked:
                if backend.key in chosen:
                    continue
                if refusal := _unloadable(request, backend):
                    refused.append(refusal)
                else:
                    chosen[backend.key] = backend
        if not chosen:
            raise request.error(_nothing_works(refused))
        return Selection(request.kind, request.choice, tuple(chosen.values()), tuple(refused))

    def attention(self, request: Request, preferred_page_size: int) -> AttentionSelection:
        """Resolve attention; see `PluginManager.resolve_attention`."""
        parts = request.elements()
        if len(parts) > len(_SLOTS):
            raise request.error("takes one name, or PREFILL,DECODE, or PREFILL,DECODE,LARGE_DECODE")
        refused: list[Refusal] = []
        if len(parts) == 1 and parts[0] != AUTO:
            candidates = [[self._lookup.named(request, parts[0], BOTH_PHASES)]] * len(_SLOTS)
        else:
            parts += parts[-1:] * (len(_SLOTS) - len(parts))
            candidates = [
                self._candidates(request, part, slot, refused)
                for part, slot in zip(parts, _SLOTS, strict=True)
            ]
        return self._combine(request, candidates, refused, preferred_page_size)

    def _candidates(
        self, request: Request, part: str, slot: _Slot, refused: list[Refusal]
    ) -> list[SelectedBackend]:
        """Return who could serve a part of the work, the best first; others go to refused."""
        if part != AUTO:
            return [self._lookup.named(request, part, (slot.phase,))]
        context = replace(request.context, decode_reqs=slot.decode_reqs)
        ranked, others = self._lookup.ranked(replace(request, context=context), (slot.phase,))
        refused += [other for other in others if other not in refused]
        if not ranked:
            raise request.error(f"for {slot.phase}, {_nothing_works(others)}")
        return ranked

    def _combine(
        self,
        request: Request,
        candidates: Sequence[Sequence[SelectedBackend]],
        refused: list[Refusal],
        preferred_page_size: int,
    ) -> AttentionSelection:
        """Pick the best ones that share a page size and can be imported."""
        wanted = request.context.page_size
        checked: dict[str, Refusal | None] = {}
        for chosen in sorted(product(*candidates), key=_joint_rank):
            each = {backend.key: backend for backend in chosen}
            capabilities = [backend.capabilities for backend in each.values()]
            page_size = wanted or shared_page_size(capabilities, preferred_page_size)
            if page_size is None:
                refused.append(_unsuited(tuple(each.values())))
                continue
            for key, backend in each.items():
                if key not in checked:
                    checked[key] = _unloadable(request, backend)
                    refused += [found for found in [checked[key]] if found is not None]
            if all(checked[key] is None for key in each):
                others = {other.key: other for ranked in candidates for other in ranked}
                outranked = [
                    _outranked(other, chosen[-1])
                    for key, other in others.items()
                    if key not in each and checked.get(key) is None
                ]
                prefill, decode, large_decode = chosen
                return AttentionSelection(
                    choice=request.choice,
                    prefill=prefill,
                    decode=decode,
                    large_decode=large_decode,
                    page_size=page_size,
                    refused=(*refused, *outranked),
                )
        raise request.error("; ".join(refusal.reason for refusal in refused))


@dataclass(frozen=True, slots=True)
class _Slot:
    """A part of the work that may have a backend of its own."""

    phase: Phase
    decode_reqs: int | None = None


_SLOTS = (_Slot("prefill"), _Slot("decode", SMALL_DECODE_REQS), _Slot("decode"))


def _unloadable(request: Request, backend: SelectedBackend) -> Refusal | None:
    """Try the import of something that ``auto`` picked; what the user named fails later, loudly."""
    if request.is_dry or backend.is_named:
        return None
    try:
        backend.load()
    except PluginError as error:
        logger.warning("%s %s: passed over: %s", request.flag, request.choice, error)
        logger.debug("the import that failed", exc_info=error)
        return Refusal(backend.name, backend.distribution, str(error))
    return None


def _joint_rank(
    chosen: tuple[SelectedBackend, ...],
) -> tuple[int, int, tuple[tuple[int, bool, str], ...]]:
    """Order by the sum of priorities; among equals the fewest different backends come first."""
    total = sum(backend.availability.priority for backend in chosen)
    return -total, len({backend.key for backend in chosen}), tuple(map(rank_of, chosen))


def _outranked(other: SelectedBackend, winner: SelectedBackend) -> Refusal:
    mine, best = other.availability.priority, winner.availability.priority
    reason = f"priority {mine}, and {winner.name} has {best}"
    return Refusal(other.name, other.distribution, reason)


def _nothing_works(refused: list[Refusal]) -> str:
    reasons = "; ".join(str(refusal) for refusal in refused)
    return f"no backend works here: {reasons or 'none is installed, reinstall minisgl-core'}"


def _unsuited(chosen: Sequence[SelectedBackend]) -> Refusal:
    wants = [f"{b.name} wants {page_sizes_of(b.capabilities)}" for b in chosen]
    reason = f"no page size suits {'both' if len(chosen) == 2 else 'all'}: {', '.join(wants)}"
    return Refusal(",".join(b.name for b in chosen), "together", reason)
