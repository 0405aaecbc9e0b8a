"""Reading a trace: every line is checked once, so that whoever runs it can rely on it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from minisgl.errors import RequestError, SettingsError
from minisgl.scheduler.trace import (
    EVENTS,
    KIND,
    TRACE_FORMAT,
    Again,
    Arrival,
    Decision,
    Ending,
    Event,
    Header,
    Trace,
    written_out,
)
from minisgl.scheduler.trace_params import made_params
from minisgl.shown import shown

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


def read_trace(path: Path) -> Trace:
    """Read a trace; a last line that was cut off is left out, with a warning.

    Raises:
        SettingsError: The file cannot be read, is no trace, is of another format, or has a value
            that no recording has; the message names the line, the field, the value and what is
            allowed.
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
    return Trace(header, list(written_out(_Events(path, header).read(lines[1:]))))


def _header(path: Path, line: bytes) -> Header:
    where = f"{path}: line 1"
    content = _parsed(where, line)
    if content.pop(KIND, None) != "header":
        raise SettingsError(f"{path}: is no trace: its first line is no header")
    if content.get("format") != TRACE_FORMAT:
        raise SettingsError(
            f"{path}: is a trace of format {shown(content.get('format'))}; this version reads "
            f"{TRACE_FORMAT}"
        )
    header = _made(where, TypeAdapter(Header), content)
    limits = header.limits
    if header.block_size != limits.page_size:
        _refuse(where, "block_size", header.block_size, f"limits.page_size, {limits.page_size}")
    return header


class _Events:
    """Reads the lines behind the header, each in the light of those before it."""

    def __init__(self, path: Path, header: Header) -> None:
        self._path = path
        self._header = header
        self._adapters: dict[object, tuple[type[Event], TypeAdapter[Event]]] = {
            kind.__name__.lower(): (kind, TypeAdapter(kind)) for kind in EVENTS
        }
        self._tick = 0
        self._has_decoded = False

    def read(self, lines: list[bytes]) -> Iterator[Event]:
        """Yield the events.

        Raises:
            SettingsError: As for `read_trace`.
        """
        for number, line in enumerate(lines, start=2):
            where = f"{self._path}: line {number}"
            content = _parsed(where, line)
            name = content.pop(KIND, None)
            if not isinstance(name, str) or name not in self._adapters:
                known = ", ".join(map(str, self._adapters))
                raise SettingsError(f"{where}: unknown event {shown(name)}; known: {known}")
            event = _made(where, self._adapters[name][1], content)
            self._check_order(where, event)
            if isinstance(event, Arrival):
                self._check_arrival(where, event)
            elif isinstance(event, Ending):
                self._check_ending(where, event)
            yield event

    def _check_order(self, where: str, event: Event) -> None:
        """Refuse what cannot come behind the lines before it."""
        if event.tick < self._tick:
            _refuse(where, "tick", event.tick, f"at least {self._tick}, that of the line before")
        self._tick = event.tick
        if isinstance(event, Again) and not self._has_decoded:
            raise SettingsError(f"{where}: event 'again': no decode step is before it")
        self._has_decoded |= isinstance(event, Decision) and event.phase == "decode"

    def _check_arrival(self, where: str, arrival: Arrival) -> None:
        """Refuse a prompt whose parts do not fit together, and parameters that nobody can have."""
        try:
            made_params(arrival.params)
        except RequestError as error:
            raise SettingsError(f"{where}: params: {error}") from error
        self._check_tokens(where, arrival.token_ids)
        # Of an invalid prompt nothing but its length is recorded.
        num_tokens = 0 if arrival.is_invalid else arrival.prompt_len
        if arrival.prompt_len == 0 and not arrival.is_invalid:
            _refuse(where, "prompt_len", 0, "at least 1")
        if arrival.token_ids is not None and len(arrival.token_ids) != num_tokens:
            _refuse(where, "token_ids", arrival.token_ids, f"a list of {num_tokens} token ids")
        num_blocks = num_tokens // self._header.block_size
        if len(arrival.blocks) != num_blocks:
            _refuse(where, "blocks", arrival.blocks, f"a list of {num_blocks} names")

    def _check_ending(self, where: str, ending: Ending) -> None:
        self._check_tokens(where, ending.token_ids)
        most = self._header.limits.max_seq_len
        for name in ("num_tokens", "num_cached"):
            if getattr(ending, name) > most:
                _refuse(where, name, getattr(ending, name), f"at most limits.max_seq_len, {most}")

    def _check_tokens(self, where: str, token_ids: list[int] | None) -> None:
        """Refuse tokens outside the vocabulary, and such as the header does not announce."""
        has_prompts, vocab_size = self._header.has_prompts, self._header.limits.vocab_size
        if (token_ids is not None) != has_prompts:
            wanted = "a list, as the header's has_prompts is true" if has_prompts else "left out"
            _refuse(where, "token_ids", token_ids, wanted)
        for token_id in token_ids or ():
            if token_id >= vocab_size:
                _refuse(where, "token_ids", token_id, f"below limits.vocab_size, {vocab_size}")


def _parsed(where: str, line: bytes) -> dict[str, Any]:  # Any: JSON
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{where}: is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise SettingsError(f"{where}: is no JSON object")
    return content


def _made(where: str, adapter: TypeAdapter[_T], content: dict[str, Any]) -> _T:  # Any: JSON
    try:
        return adapter.validate_python(content)
    except ValidationError as error:
        raise SettingsError(f"{where}: {_sentence(error.errors()[0])}") from error


def _sentence(detail: ErrorDetails) -> str:
    """Say which field has which value, and what would do."""
    first, *rest = detail["loc"]
    name = str(first) + "".join(f".{key}" if isinstance(key, str) else f"[{key}]" for key in rest)
    if detail["type"] in ("missing", "missing_argument"):
        return f"{name}: is missing"
    if detail["type"] == "unexpected_keyword_argument":
        return f"{name}: unknown field"
    return f"{name} {shown(detail['input'])}: must be {_wanted(detail)}"


def _wanted(detail: ErrorDetails) -> str:
    """Say what would do, in words of JSON rather than of Python."""
    match detail["type"]:
        case "int_type":
            return "an integer"
        case "string_type":
            return "a text"
        case "list_type" | "named_tuple_type":
            return "a list"
        case "dict_type" | "dataclass_type":
            return "a JSON object"
        case "greater_than_equal":
            return f"at least {detail['ctx']['ge']}"
        case "less_than_equal":
            return f"at most {detail['ctx']['le']}"
    wanted = detail["msg"].removeprefix("Input should be ")
    return f"{wanted[:1].lower()}{wanted[1:]}"


def _refuse(where: str, name: str, value: object, wanted: str) -> NoReturn:
    raise SettingsError(f"{where}: {name} {shown(value)}: must be {wanted}")
