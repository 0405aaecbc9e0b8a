"""How a settings section is written: the base class, extra spellings, and what a field allows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    StringConstraints,
    field_validator,
)
from pydantic.fields import FieldInfo

_DECIMAL: Mapping[str, int] = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY: Mapping[str, int] = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class SettingsSection(BaseModel):
    """Base of every section: frozen, closed, defaults checked like given values.

    A plugin derives from it too. Every field has a range and a ``description`` that names its
    unit and ends in ``"Read by ...``".
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_other_encodings(cls, value: object) -> object:
        """Refuse bytes of another encoding here, before an answer or a log cannot be written."""
        if not _is_utf8(value):
            raise ValueError("must be UTF-8 text")
        return value


@dataclass(frozen=True, slots=True)
class Setting:
    """What a field says beyond pydantic: ``Annotated[int, Setting(flags=("--tp-size",))]``.

    Attributes:
        flags: Further flags, complete with dashes.
        keywords: Further names as a Python keyword.
        allowed: What the field allows, where the type and its bounds do not say it.
        metavar: What help shows in place of the value.
        is_secret: Whether errors leave the value out.
    """

    flags: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    allowed: str = ""
    metavar: str = ""
    is_secret: bool = False


def parse_bytes(value: object) -> object:
    """Turn ``"512MiB"``, ``"2G"`` or a number into bytes; leave the rest to the validator."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", value.lower())
    unit = None if match is None else {**_DECIMAL, **_BINARY}.get(match[2])
    return value if match is None or unit is None else int(float(match[1]) * unit)


def format_bytes(value: int) -> str:
    """Write a size with the largest unit that leaves it whole; `parse_bytes` reads it back."""
    for unit, factor in sorted(_BINARY.items(), key=lambda item: -item[1]):
        if value and value % factor == 0:
            return f"{value // factor}{unit[0].upper()}iB"
    return str(value)


Bytes = Annotated[int, BeforeValidator(parse_bytes), Setting(metavar="BYTES")]
"""A size in bytes; text may carry a unit."""

ListedText = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
"""An entry of a list of texts: an empty one is an unset variable rather than a wish."""


def setting_of(info: FieldInfo) -> Setting:
    """Return what a field says about itself, all its `Setting` marks merged."""
    marks = [mark for mark in info.metadata if isinstance(mark, Setting)]
    return Setting(
        flags=tuple(flag for mark in marks for flag in mark.flags),
        keywords=tuple(keyword for mark in marks for keyword in mark.keywords),
        allowed=next((mark.allowed for mark in marks if mark.allowed), ""),
        metavar=next((mark.metavar for mark in marks if mark.metavar), ""),
        is_secret=any(mark.is_secret for mark in marks),
    )


def base_type(info: FieldInfo) -> Any:  # Any: an annotation
    """Return a field's type without ``None`` and without the parameters of a collection."""
    kinds = [kind for kind in _alternatives(info) if kind is not NoneType]
    return get_origin(kinds[0]) or kinds[0] if len(kinds) == 1 else object


def choices_of(info: FieldInfo) -> tuple[str, ...]:
    """Return the values of a ``Literal`` field, or nothing."""
    found = [kind for kind in _alternatives(info) if get_origin(kind) is Literal]
    return tuple(str(choice) for kind in found for choice in get_args(kind))


def is_optional(info: FieldInfo) -> bool:
    """Return whether a field may be left to whoever reads it (``None``, written ``auto``)."""
    return NoneType in _alternatives(info) and base_type(info) is not str


def is_list(info: FieldInfo) -> bool:
    """Return whether a field holds several values."""
    return base_type(info) in (tuple, list, frozenset, set)


def allowed_values(info: FieldInfo) -> str:
    """Say in words what a field allows, such as ``"an integer from 1 to 8"``."""
    text = setting_of(info).allowed or _allowed_by_type(info)
    return f"{text}, or auto" if is_optional(info) else text


def metavar_of(info: FieldInfo) -> str:
    """Return what help shows in place of a field's value."""
    names = {int: "INT", float: "FLOAT", str: "TEXT", dict: "JSON"}
    if choices := choices_of(info):
        return "{" + ",".join(choices) + "}"
    fallback = "A,B,..." if is_list(info) else names.get(base_type(info), "VALUE")
    return setting_of(info).metavar or fallback


def from_text(text: str, info: FieldInfo) -> object:
    """Turn a flag's or variable's text into what the validator expects of the field.

    Lists are comma-separated or JSON, mappings are JSON, ``auto`` or ``none`` is ``None`` where the
    field is optional; everything else stays text and is parsed by the validator. Empty entries of a
    list are kept, for the validator to refuse.
    """
    if is_optional(info) and text.lower() in ("auto", "none"):
        return None
    is_json = text.lstrip().startswith(("[", "{"))
    if is_json and (is_list(info) or base_type(info) is dict):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    if is_list(info):
        return [part.strip() for part in text.split(",")]
    return text


def _alternatives(info: FieldInfo) -> tuple[Any, ...]:  # Any: annotations
    annotation = info.annotation
    is_union = get_origin(annotation) in (Union, UnionType)
    parts = get_args(annotation) if is_union else (annotation,)
    return tuple(get_args(part)[0] if get_origin(part) is Annotated else part for part in parts)


def _allowed_by_type(info: FieldInfo) -> str:
    kind = base_type(info)
    if choices := choices_of(info):
        return f"one of {', '.join(choices)}"
    if kind is bool:
        return "true or false"
    if kind in (int, float):
        return " ".join(["an integer" if kind is int else "a number", *_bounds(info)])
    if kind is str:
        return _text_of(info)
    if is_list(info):
        return _list_of(info)
    return "a mapping" if kind is dict else "a value"


def _text_of(info: FieldInfo) -> str:
    low = next((m.min_length for m in info.metadata if isinstance(m, MinLen)), 0)
    high = next((m.max_length for m in info.metadata if isinstance(m, MaxLen)), None)
    if high is None:
        return "text that is not empty" if low else "text"
    return f"text of {low} to {high} characters" if low else f"text of at most {high} characters"


def _list_of(info: FieldInfo) -> str:
    """Name the entries of a list, where all are of one simple type."""
    kinds = [get_args(kind) for kind in _alternatives(info) if kind is not NoneType]
    item = kinds[0][0] if len(kinds) == 1 and kinds[0] else None
    if item == ListedText:
        return "a list of texts that are not empty"
    names = {str: "texts", int: "integers", float: "numbers"}
    return f"a list of {names[item]}" if item in names else "a list"


def _is_utf8(value: object) -> bool:
    """Return whether all texts of a value can be written as UTF-8."""
    match value:
        case str():
            # What the system hands over as bytes of another encoding is lone surrogates here.
            return not any("\ud800" <= character <= "\udfff" for character in value)
        case Mapping():
            return all(_is_utf8(item) for pair in value.items() for item in pair)
        case list() | tuple() | set() | frozenset():
            return all(map(_is_utf8, value))
        case _:
            return True


def _bounds(info: FieldInfo) -> list[str]:
    low = next((m.ge for m in info.metadata if isinstance(m, Ge)), None)
    above = next((m.gt for m in info.metadata if isinstance(m, Gt)), None)
    high = next((m.le for m in info.metadata if isinstance(m, Le)), None)
    below = next((m.lt for m in info.metadata if isinstance(m, Lt)), None)
    if low is not None and high is not None:
        return [f"from {low} to {high}"]
    parts = [
        (low, f"at least {low}"),
        (above, f"above {above}"),
        (high, f"at most {high}"),
        (below, f"below {below}"),
    ]
    return [" and ".join(text for bound, text in parts if bound is not None)]
