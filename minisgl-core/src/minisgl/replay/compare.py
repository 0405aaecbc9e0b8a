"""Where a replay differs from what was recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any

from minisgl.replay.engine import TokenDifference
from minisgl.scheduler.trace import Decision, Ending, Event, Fault, Part, as_plain


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place at which a replay went another way.

    Attributes:
        kind: ``"step"``, ``"ending"`` or ``"token"``.
        tick: When, on the scheduler's clock; of the two the earlier.
        text: What differs, in a sentence.
        recorded: What the trace has, as JSON; ``None`` where it has nothing.
        replayed: What happened here; ``None`` where nothing did.
    """

    kind: str
    tick: int
    text: str
    recorded: dict[str, Any] | None  # Any: JSON
    replayed: dict[str, Any] | None  # Any: JSON


@dataclass(frozen=True, slots=True)
class Totals:
    """What a run came to.

    Attributes:
        num_prefill_steps: Launched prefill steps.
        num_decode_steps: Launched decode steps.
        num_prefill_tokens: Tokens computed in prefill steps.
        num_cached_tokens: Prompt tokens that ended requests had found in the cache.
        num_retractions: Times that a request began again after it was sent back to the queue.
        finished: Terminal results by reason.
    """

    num_prefill_steps: int = 0
    num_decode_steps: int = 0
    num_prefill_tokens: int = 0
    num_cached_tokens: int = 0
    num_retractions: int = 0
    finished: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, events: Sequence[Event]) -> Totals:
        """Count."""
        steps = [event for event in events if isinstance(event, Decision)]
        prefills = [step for step in steps if step.phase == "prefill"]
        endings = [event for event in events if isinstance(event, Ending)]
        retracted: dict[int, int] = {}
        for step in prefills:
            for part in step.parts:
                retracted[part.uid] = max(retracted.get(part.uid, 0), part.num_retractions)
        return cls(
            num_prefill_steps=len(prefills),
            num_decode_steps=len(steps) - len(prefills),
            num_prefill_tokens=sum(p.seq_len - p.cached_len for s in prefills for p in s.parts),
            num_cached_tokens=sum(ending.num_cached for ending in endings),
            num_retractions=sum(retracted.values()),
            finished=dict(sorted(Counter(ending.reason for ending in endings).items())),
        )


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a replay.

    Attributes:
        first: The first difference, or ``None``.
        num_different_steps: Steps that differ, from the first one on.
        differing_tokens: Of each request the first token that differs; what comes after the first
            of them may only follow from it.
        recorded: What the recording came to.
        replayed: What the replay came to.
        is_complete: Whether the recording was closed in order.
        has_tokens: Whether tokens could be compared.
    """

    first: Difference | None
    num_different_steps: int
    differing_tokens: list[TokenDifference]
    recorded: Totals
    replayed: Totals
    is_complete: bool
    has_tokens: bool

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        """Return everything as JSON has it."""
        return {"differs": self.first is not None, **asdict(self)}


def compare(
    recorded: Sequence[Event],
    replayed: Sequence[Event],
    tokens: Sequence[TokenDifference] = (),
    *,
    is_complete: bool = True,
    has_tokens: bool = False,
) -> Report:
    """Compare two runs event by event.

    Args:
        recorded: Of the trace.
        replayed: Of the replay.
        tokens: Tokens that differed.
        is_complete: Whether the recording was closed in order.
        has_tokens: Whether tokens could be compared.
    """
    step, num_steps = _first_step(_steps(recorded), _steps(replayed))
    candidates = [step, _first_ending(recorded, replayed), _first_token(tokens)]
    found = [each for each in candidates if each is not None]
    return Report(
        # Of several at one tick the decision comes first: the others follow from it.
        first=min(found, key=lambda each: each.tick) if found else None,
        num_different_steps=num_steps,
        differing_tokens=list(tokens),
        recorded=Totals.of(recorded),
        replayed=Totals.of(replayed),
        is_complete=is_complete,
        has_tokens=has_tokens,
    )


def _steps(events: Sequence[Event]) -> list[Decision | Fault]:
    return [event for event in events if isinstance(event, Decision | Fault)]


def _first_step(
    recorded: Sequence[Decision | Fault], replayed: Sequence[Decision | Fault]
) -> tuple[Difference | None, int]:
    """Return the first step that differs, and how many do."""
    first: Difference | None = None
    count = 0
    for number, (before, now) in enumerate(zip_longest(recorded, replayed), start=1):
        text = _step_text(before, now)
        if not text:
            continue
        count += 1
        if first is None:
            tick = min(each.tick for each in (before, now) if each is not None)
            text = f"step {number}: {text}"
            first = Difference("step", tick, text, _plain(before), _plain(now))
    return first, count


def _step_text(before: Decision | Fault | None, now: Decision | Fault | None) -> str:
    """Say how two steps differ; nothing where they do not."""
    if before is None or now is None:
        only = "here" if before is None else "in the recording"
        return f"only {only}: {_describe(before or now)}"
    if isinstance(before, Fault) or isinstance(now, Fault):
        same = isinstance(before, Fault) and isinstance(now, Fault) and before.error == now.error
        return "" if same else f"{_describe(before)} in the recording, {_describe(now)} here"
    if before.phase != now.phase:
        return f"{_describe(before)} in the recording, {_describe(now)} here"
    return _parts_text(before.parts, now.parts) or _rest_text(before, now)


def _parts_text(before: Sequence[Part], now: Sequence[Part]) -> str:
    """Say how the requests of two steps differ."""
    uids, new_uids = [part.uid for part in before], [part.uid for part in now]
    missing = [uid for uid in uids if uid not in new_uids]
    extra = [uid for uid in new_uids if uid not in uids]
    if missing or extra:
        texts = [f"request{_list(missing)} only in the recording"] if missing else []
        texts += [f"request{_list(extra)} only here"] if extra else []
        return "other requests: " + "; ".join(texts)
    if uids != new_uids:
        return f"the same requests in another order:{_list(uids)} recorded,{_list(new_uids)} here"
    for part, other in zip(before, now, strict=True):
        if part == other:
            continue
        pairs = zip(Part._fields, part, other, strict=True)
        name, old, new = next(pair for pair in pairs if pair[1] != pair[2])
        what = {
            "cached_len": "tokens before the step, cached ones included",
            "seq_len": "tokens after the step",
            "is_sampled": "whether a token is sampled",
            "num_retractions": "retractions so far",
        }[name]
        return f"request {part.uid}: {what}: {old} recorded, {new} here"
    return ""


def _rest_text(before: Decision, now: Decision) -> str:
    """Say how two steps of the same requests differ."""
    if before.error != now.error:
        return f"{before.error or 'no error'} in the recording, {now.error or 'no error'} here"
    if before.tick != now.tick:
        return f"the same step at another time: tick {before.tick} recorded, {now.tick} here"
    return ""


def _first_ending(recorded: Sequence[Event], replayed: Sequence[Event]) -> Difference | None:
    """Return the first request, in the order of the recording, that ended differently."""
    before = [event for event in recorded if isinstance(event, Ending)]
    now = [event for event in replayed if isinstance(event, Ending)]
    left: dict[int, list[Ending]] = {}
    for ending in now:
        left.setdefault(ending.uid, []).append(ending)
    for ending in before:
        others = left.get(ending.uid)
        if not others:
            text = f"request {ending.uid}: ended by {ending.reason} in the recording, not here"
            return Difference("ending", ending.tick, text, as_plain(ending), None)
        other = others.pop(0)
        for name in ("reason", "num_tokens", "num_cached"):
            old, new = getattr(ending, name), getattr(other, name)
            if old != new:
                text = f"request {ending.uid}: {name} {old} recorded, {new} here"
                tick = min(ending.tick, other.tick)
                return Difference("ending", tick, text, as_plain(ending), as_plain(other))
    return None


def _first_token(tokens: Sequence[TokenDifference]) -> Difference | None:
    if not tokens:
        return None
    first = tokens[0]
    text = (
        f"request {first.uid}: token {first.index} of the output is {first.recorded} recorded, "
        f"{first.replayed} here"
    )
    recorded, replayed = ({"token_id": each} for each in (first.recorded, first.replayed))
    return Difference("token", first.tick, text, recorded, replayed)


def _describe(step: Decision | Fault | None) -> str:
    if isinstance(step, Fault):
        return f"a step that failed ({step.error})"
    assert step is not None, "one of two steps is there"
    return f"a {step.phase} of request{_list([part.uid for part in step.parts])}"


def _list(uids: Sequence[int]) -> str:
    """Return a plural ending, if there are several, and the numbers."""
    shown = ", ".join(map(str, uids[:8])) + (" …" if len(uids) > 8 else "")
    return f"{'s' if len(uids) > 1 else ''} {shown}"


def _plain(step: Decision | Fault | None) -> dict[str, Any] | None:  # Any: JSON
    return None if step is None else as_plain(step)
