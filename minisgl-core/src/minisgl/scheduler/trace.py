"""A trace: what came to a scheduler, what it decided, and how requests ended; one JSON per line.

The first line is the header. Times are counted in *ticks*, the scheduler's own clock, which moves
by one each time that it asks for messages, and in seconds since the start of the recording.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import ConfigDict, Field

from minisgl.message.types import FinishReason

TRACE_FORMAT = 1
"""The version of the format; a reader refuses others."""

KIND = "event"
"""The key that says what a line is."""

# Types with their ranges, for whoever reads a trace. Nothing checks them where a record is made.
# Strict, so that true is no integer and 1.5 is not cut to one.
Number = Annotated[int, Field(strict=True, ge=-(2**63), le=2**63 - 1)]
Tick = Annotated[int, Field(strict=True, ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Field(strict=True, ge=0)]
Count = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
Size = Annotated[int, Field(strict=True, ge=1, le=2**31 - 1)]
PageSize = Annotated[int, Field(strict=True, ge=1, le=65536)]
Flag = Annotated[bool, Field(strict=True)]


class _Record:
    """Base of what a line holds: closed, and all numbers finite, when it is read."""

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class Limits(_Record):
    """Sizes of the recorded engine; see `EngineLimits`.

    Attributes:
        num_pages: Pages that requests could use.
        page_size: Tokens of a page.
        max_running_reqs: Requests that could run at once.
        max_seq_len: Most tokens of a request, prompt and output together.
        vocab_size: Token ids are below this.
        eos_token_ids: Ids that end a sequence, in order.
    """

    num_pages: Size
    page_size: PageSize
    max_running_reqs: Size
    max_seq_len: Size
    vocab_size: Size
    eos_token_ids: list[Count]


@dataclass(frozen=True, slots=True)
class Header(_Record):
    """What was recorded.

    Attributes:
        format: `TRACE_FORMAT`.
        version: Of minisgl.
        created: Date and time, ISO 8601.
        settings: Values of the core's settings and of what was given to plugins, by name.
        limits: The engine's sizes.
        backends: Name of what served each kind.
        block_size: Tokens of a block of `Arrival.blocks`.
        has_prompts: Whether token ids are in the trace.
    """

    format: Size
    version: str
    created: str
    settings: dict[str, Any]  # Any: settings of every type
    limits: Limits
    backends: dict[str, str]
    block_size: PageSize
    has_prompts: Flag


@dataclass(frozen=True, slots=True)
class Arrival(_Record):
    """A request has come.

    Attributes:
        tick: When.
        time_s: When.
        uid: Its number; may be used again once it has ended.
        prompt_len: Tokens of the prompt.
        blocks: A name for each whole block of the prompt together with all before it, so that two
            prompts begin with as many equal names as they have blocks in common.
        params: Sampling parameters that differ from their defaults. Without prompts those that
            hold text or token ids are left out.
        priority: As in `UserMsg`.
        is_invalid: Whether it holds a token id outside the vocabulary.
        token_ids: The prompt, where prompts are recorded.
    """

    tick: Tick
    time_s: Seconds
    uid: Number
    prompt_len: Count
    blocks: list[str]
    params: dict[str, Any]  # Any: numbers, strings and lists of them
    priority: Number = 0
    is_invalid: Flag = False
    token_ids: list[Count] | None = None


@dataclass(frozen=True, slots=True)
class Abort(_Record):
    """Somebody wants a request to end."""

    tick: Tick
    time_s: Seconds
    uid: Number
    reason: str


@dataclass(frozen=True, slots=True)
class Flush(_Record):
    """Somebody wants the cache to forget what nobody uses."""

    tick: Tick
    time_s: Seconds


class Part(NamedTuple):
    """What a step computes of one request.

    Attributes:
        uid: The request.
        cached_len: Tokens before the first one that is computed.
        seq_len: Tokens after the last one.
        is_sampled: Whether a token comes out of it.
        num_retractions: Times that the request had been sent back to the queue.
    """

    uid: Number
    cached_len: Count
    seq_len: Count
    is_sampled: Flag = True
    num_retractions: Count = 0


@dataclass(frozen=True, slots=True)
class Decision(_Record):
    """A step that was launched.

    Attributes:
        tick: When.
        time_s: When.
        phase: ``"prefill"`` or ``"decode"``.
        parts: Its requests, in order.
        error: What launching it raised, or nothing.
    """

    tick: Tick
    time_s: Seconds
    phase: Literal["prefill", "decode"]
    parts: list[Part]
    error: str = ""


@dataclass(frozen=True, slots=True)
class Again(_Record):
    """A decode step of the same requests as the decode step before, one token on."""

    tick: Tick
    time_s: Seconds


@dataclass(frozen=True, slots=True)
class Fault(_Record):
    """Waiting for a step has raised an error."""

    tick: Tick
    time_s: Seconds
    error: str


@dataclass(frozen=True, slots=True)
class Ending(_Record):
    """A request has got its terminal result.

    Attributes:
        tick: When.
        time_s: When.
        uid: The request.
        reason: As in `FinishedReq`.
        num_tokens: Tokens of its output.
        num_cached: Tokens of its prompt that the cache had.
        detail: Why it was aborted or failed.
        blocks: Names of the whole blocks of its output, behind those of the prompt.
        token_ids: The output, where prompts are recorded.
    """

    tick: Tick
    time_s: Seconds
    uid: Number
    reason: FinishReason
    num_tokens: Count
    num_cached: Count
    detail: str = ""
    blocks: list[str] = field(default_factory=list)
    token_ids: list[Count] | None = None


@dataclass(frozen=True, slots=True)
class Restart(_Record):
    """The scheduler was thrown away after a step was left half done, and another one made."""

    tick: Tick
    time_s: Seconds


@dataclass(frozen=True, slots=True)
class End(_Record):
    """The recording was closed in order."""

    tick: Tick
    time_s: Seconds


Event = Arrival | Abort | Flush | Decision | Again | Fault | Ending | Restart | End

EVENTS: tuple[type[Event], ...] = (
    Arrival,
    Abort,
    Flush,
    Decision,
    Again,
    Fault,
    Ending,
    Restart,
    End,
)
"""All kinds of lines but the first."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace that was read.

    Attributes:
        header: What was recorded.
        events: In order. `Again` is written out as the `Decision` that it stands for.
    """

    header: Header
    events: list[Event]

    @property
    def is_complete(self) -> bool:
        """Whether the recording was closed in order, rather than cut off by a crash."""
        return bool(self.events) and isinstance(self.events[-1], End)

    @property
    def last_tick(self) -> int:
        """When it ends."""
        return self.events[-1].tick if self.events else 0


def encode_line(record: Header | Event) -> bytes:
    """Return a record as a line; fields that have their defaults are left out."""
    content = {KIND: type(record).__name__.lower()}
    for each in fields(record):
        value = getattr(record, each.name)
        if each.default is not MISSING and value == each.default:
            continue
        content[each.name] = value
    return json.dumps(content, separators=(",", ":"), default=asdict).encode() + b"\n"


def written_out(records: Iterable[Event]) -> Iterator[Event]:
    """Replace each `Again` by the decision that it stands for."""
    last: list[Part] = []
    for record in records:
        if isinstance(record, Again):
            last = advanced(last)
            yield Decision(record.tick, record.time_s, "decode", last)
            continue
        if isinstance(record, Decision) and record.phase == "decode":
            last = record.parts
        yield record


def advanced(parts: Iterable[Part]) -> list[Part]:
    """Return the parts of the decode step that follows one, if nothing happens in between."""
    return [part._replace(cached_len=part.seq_len, seq_len=part.seq_len + 1) for part in parts]


def as_plain(record: Header | Event) -> dict[str, Any]:  # Any: JSON
    """Return a record as JSON would have it, for reports."""
    return {KIND: type(record).__name__.lower(), **asdict(record)}
