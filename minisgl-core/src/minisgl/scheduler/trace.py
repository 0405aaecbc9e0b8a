"""A trace: what came to a scheduler, what it decided, and how requests ended; one JSON per line.

The first line is the header. Times are counted in *ticks*, the scheduler's own clock, which moves
by one each time that it asks for messages, and in seconds since the start of the recording.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from minisgl.errors import SettingsError

logger = logging.getLogger(__name__)

TRACE_FORMAT = 1
"""The version of the format; a reader refuses others."""

_KIND = "event"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Header:
    """What was recorded.

    Attributes:
        format: `TRACE_FORMAT`.
        version: Of minisgl.
        created: Date and time, ISO 8601.
        settings: Values of the core's settings and of what was given to plugins, by name.
        limits: The engine's sizes; ``eos_token_ids`` is a list.
        backends: Name of what served each kind.
        block_size: Tokens of a block of `Arrival.blocks`.
        has_prompts: Whether token ids are in the trace.
    """

    format: int
    version: str
    created: str
    settings: dict[str, Any]  # Any: settings of every type
    limits: dict[str, Any]  # Any: numbers and a list of them
    backends: dict[str, str]
    block_size: int
    has_prompts: bool


@dataclass(frozen=True, slots=True)
class Arrival:
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

    tick: int
    time_s: float
    uid: int
    prompt_len: int
    blocks: list[str]
    params: dict[str, Any]  # Any: numbers, strings and lists of them
    priority: int = 0
    is_invalid: bool = False
    token_ids: list[int] | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """Somebody wants a request to end."""

    tick: int
    time_s: float
    uid: int
    reason: str


@dataclass(frozen=True, slots=True)
class Flush:
    """Somebody wants the cache to forget what nobody uses."""

    tick: int
    time_s: float


class Part(NamedTuple):
    """What a step computes of one request.

    Attributes:
        uid: The request.
        cached_len: Tokens before the first one that is computed.
        seq_len: Tokens after the last one.
        is_sampled: Whether a token comes out of it.
        num_retractions: Times that the request had been sent back to the queue.
    """

    uid: int
    cached_len: int
    seq_len: int
    is_sampled: bool = True
    num_retractions: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """A step that was launched.

    Attributes:
        tick: When.
        time_s: When.
        phase: ``"prefill"`` or ``"decode"``.
        parts: Its requests, in order.
        error: What launching it raised, or nothing.
    """

    tick: int
    time_s: float
    phase: str
    parts: list[Part]
    error: str = ""


@dataclass(frozen=True, slots=True)
class Again:
    """A decode step of the same requests as the decode step before, one token on."""

    tick: int
    time_s: float


@dataclass(frozen=True, slots=True)
class Fault:
    """Waiting for a step has raised an error."""

    tick: int
    time_s: float
    error: str


@dataclass(frozen=True, slots=True)
class Ending:
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

    tick: int
    time_s: float
    uid: int
    reason: str
    num_tokens: int
    num_cached: int
    detail: str = ""
    blocks: list[str] = field(default_factory=list)
    token_ids: list[int] | None = None


@dataclass(frozen=True, slots=True)
class Restart:
    """The scheduler was thrown away after a step was left half done, and another one made."""

    tick: int
    time_s: float


@dataclass(frozen=True, slots=True)
class End:
    """The recording was closed in order."""

    tick: int
    time_s: float


Event = Arrival | Abort | Flush | Decision | Again | Fault | Ending | Restart | End

_EVENTS: tuple[type[Event], ...] = (
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
    content = {_KIND: type(record).__name__.lower()}
    for each in fields(record):
        value = getattr(record, each.name)
        if each.default is not MISSING and value == each.default:
            continue
        content[each.name] = value
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"


def read_trace(path: Path) -> Trace:
    """Read a trace; a last line that was cut off is left out, with a warning.

    Raises:
        SettingsError: The file cannot be read, is no trace, or is of another format.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from error
    whole, _, rest = content.rpartition(b"\n")
    if rest:
        logger.warning("%s: the last line is cut off and left out", path)
    lines = whole.split(b"\n") if whole else []
    if not lines:
        raise SettingsError(f"{path}: is empty, or was cut off before its first line ended")
    header = _header(path, lines[0])
    records = (_record(path, number, line) for number, line in enumerate(lines[1:], start=2))
    return Trace(header, list(written_out(records)))


def _header(path: Path, line: bytes) -> Header:
    content = _parsed(path, 1, line)
    if content.pop(_KIND, None) != "header":
        raise SettingsError(f"{path}: is no trace: its first line is no header")
    if content.get("format") != TRACE_FORMAT:
        raise SettingsError(
            f"{path}: is a trace of format {content.get('format')}; this version reads "
            f"{TRACE_FORMAT}"
        )
    return _made(path, 1, Header, content)


def _record(path: Path, number: int, line: bytes) -> Event:
    content = _parsed(path, number, line)
    name = content.pop(_KIND, None)
    kinds: dict[str, type[Event]] = {kind.__name__.lower(): kind for kind in _EVENTS}
    if name not in kinds:
        raise SettingsError(f"{path}: line {number}: unknown event {name!r}")
    if "parts" in content:
        content["parts"] = [Part(*part) for part in content["parts"]]
    return _made(path, number, kinds[name], content)


def _parsed(path: Path, number: int, line: bytes) -> dict[str, Any]:  # Any: JSON
    try:
        content = json.loads(line)
    except ValueError as error:
        raise SettingsError(f"{path}: line {number}: is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise SettingsError(f"{path}: line {number}: is no JSON object")
    return content


def _made(path: Path, number: int, kind: type[_T], content: dict[str, Any]) -> _T:  # Any: JSON
    try:
        return kind(**content)
    except TypeError as error:
        raise SettingsError(f"{path}: line {number}: {error}") from error


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
    return {_KIND: type(record).__name__.lower(), **asdict(record)}
