"""The settings tree as flags of an argparse parser."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from pydantic_core import PydanticUndefined

from minisgl.config.fields import base_type, format_bytes, is_list, metavar_of, setting_of
from minisgl.config.load import Given
from minisgl.config.tree import Option, SettingsTree

_DEST = "given_settings"


def add_settings(parser: argparse.ArgumentParser, tree: SettingsTree, command: str) -> None:
    """Add a flag for every option that ``command`` has, and ``--config``.

    Values stay text: they are checked together with those of the environment and the file, so that
    a wrong one is described alike wherever it comes from.
    """
    parser.set_defaults(**{_DEST: {}})
    parser.add_argument(
        "--config", metavar="FILE", help="settings file, .yaml or .toml [env MINISGL_CONFIG]"
    )
    groups: dict[int, argparse._ArgumentGroup] = {}
    for option in tree.options(command):
        section = option.section
        if id(section) not in groups:
            title = _title(section.key, section.model.__doc__ or section.model.__name__)
            groups[id(section)] = parser.add_argument_group(title)
        _add(groups[id(section)], option)


def given_settings(namespace: argparse.Namespace) -> dict[str, Given]:
    """Return the flags that were typed, by `Option.path`."""
    given: dict[str, Given] = getattr(namespace, _DEST)
    return given


def _title(key: str, doc: str) -> str:
    line = doc.strip().splitlines()[0].rstrip(".")
    return f"{key}: {line}" if key else line


def _add(group: argparse._ArgumentGroup, option: Option) -> None:
    is_switch = base_type(option.info) is bool
    flags = list(option.flags)
    if is_switch:
        flags += [f"--no-{flag[2:]}" for flag in option.flags]
    group.add_argument(
        *flags,
        action=_Collect,
        option=option,
        nargs=0 if is_switch else None,
        metavar=None if is_switch else metavar_of(option.info),
        help=help_of(option).replace("%", "%%"),
    )


def help_of(option: Option) -> str:
    """Describe an option: what it is, its default, its environment variable."""
    text = (option.info.description or "").partition(" Read ")[0].rstrip(".")
    text = text[:1].lower() + text[1:] if text[1:2].islower() else text
    default = default_of(option)
    return f"{text} [{f'default {default}, ' if default else ''}env {option.variable}]"


def default_of(option: Option) -> str:
    """Write a default as the user would; nothing where a value is needed or there is none."""
    value = option.default
    if value is PydanticUndefined:
        return ""
    if value is None:
        return "auto" if base_type(option.info) is not str else ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if setting_of(option.info).metavar == "BYTES":
        return format_bytes(value)
    return ",".join(map(str, value)) if is_list(option.info) else str(value)


class _Collect(argparse.Action):
    """Keeps a flag's text together with the spelling that was typed."""

    def __init__(self, option_strings: Sequence[str], dest: str, **rest: Any) -> None:
        """Make the action; ``rest`` holds what argparse passes on, and the option."""
        self._option: Option = rest.pop("option")
        rest["default"] = argparse.SUPPRESS
        super().__init__(option_strings, dest, **rest)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,  # text, or nothing for a switch
        option_string: str | None = None,
    ) -> None:
        """Record one occurrence; lists grow, everything else is replaced."""
        flag = option_string or self.option_strings[0]
        text = str(values)
        if self.nargs == 0:
            is_negated = flag.startswith("--no-") and flag not in self._option.flags
            text = "false" if is_negated else "true"
        # A copy, because argparse shares defaults between parses.
        given = dict(getattr(namespace, _DEST, {}))
        earlier = given.get(self._option.path)
        if earlier is not None and is_list(self._option.info):
            text = f"{earlier.value},{text}"
        given[self._option.path] = Given(text, flag, is_text=True)
        setattr(namespace, _DEST, given)
