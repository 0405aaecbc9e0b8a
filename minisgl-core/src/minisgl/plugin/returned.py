"""What plugins hand over, compared with what was asked for.

Everything here raises a `PluginError` that says what was handed over and what is wanted, and leaves
it to the caller to say by whom.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from minisgl.errors import PluginError
from minisgl.plugin.commands import Subcommand

Kinds = type | tuple[type, ...]

_COMMAND = re.compile(r"[a-z][a-z0-9_-]*( [a-z][a-z0-9_-]*)?")
_PLACE = re.compile(r"[\w.]+:\w+")


def check_items(
    result: object, noun: str, is_item: Callable[[object], bool]
) -> tuple[Any, ...]:  # Any: what is_item admits
    """Return what a hook gave as a tuple.

    Args:
        result: A list, or another sequence.
        noun: What an item of it is called, in the singular.
        is_item: Whether something is one.

    Raises:
        PluginError: It is no sequence, or something in it is no item.
    """
    if not isinstance(result, Sequence) or isinstance(result, str | bytes):
        hint = f"; put it into a list: [{noun}]" if is_item(result) else ""
        raise PluginError(f"returned {result!r:.80}, which is not a list of {noun}s{hint}")
    items = tuple(result)
    for item in items:
        if not is_item(item):
            raise PluginError(f"returned a list with {item!r:.80}, which is not a {noun}")
    return items


def check_fields(record: object, kinds: Mapping[str, Kinds]) -> None:
    """See that fields of a dataclass, whose types nothing else checks, are what they should be.

    Raises:
        PluginError: One is not.
    """
    for name, kind in kinds.items():
        value = getattr(record, name)
        if not isinstance(value, kind):
            allowed = " or ".join(each.__name__ for each in _flat(kind))
            raise PluginError(f"{name} is {value!r:.80}, which is not {allowed}")


def check_subcommand(command: Subcommand) -> None:
    """See that a subcommand can be listed and looked up.

    Raises:
        PluginError: One of its fields cannot be used.
    """
    texts = ("name", "summary", "run", "positionals", "complete_settings")
    try:
        check_fields(command, dict.fromkeys(texts, str) | {"sections": tuple})
        if command.name == "help" or not _COMMAND.fullmatch(command.name):
            raise PluginError(
                f"name is {command.name!r}, and one or two words of lower-case letters, digits, "
                "'-' and '_' are allowed, other than 'help'"
            )
        for field in ("run", "complete_settings"):
            place = getattr(command, field)
            if not _PLACE.fullmatch(place) and (place or field == "run"):
                raise PluginError(f"{field} is {place!r}, which is not 'package.module:function'")
        for section in command.sections:
            if not (isinstance(section, type) and issubclass(section, BaseModel)):
                raise PluginError(f"sections have {section!r:.80}, which is no pydantic model")
        if not (command.add_arguments is None or callable(command.add_arguments)):
            raise PluginError(f"add_arguments is {command.add_arguments!r:.80}, not a function")
    except PluginError as error:
        raise PluginError(f"the subcommand {command.name!r:.80}: {error}") from None


def _flat(kind: Kinds) -> tuple[type, ...]:
    return kind if isinstance(kind, tuple) else (kind,)
