"""``minisgl completion``: what a shell offers when the user presses Tab."""

from __future__ import annotations

import logging
import sys
from argparse import Action
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from minisgl.cli.completion_scripts import SCRIPTS
from minisgl.cli.parser import build_parser
from minisgl.config.fields import choices_of, is_optional
from minisgl.config.tree import SettingsTree
from minisgl.errors import PluginError, SettingsError
from minisgl.plugin.commands import CommandContext, Subcommand
from minisgl.plugin.discovery import KINDS
from minisgl.plugin.manager import PluginManager

logger = logging.getLogger(__name__)

_FILES = ("FILE", "DIR")
_FILE_OPTIONS = ("model", "chat_template", "ssl_certfile", "ssl_keyfile", "uds")


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of a subcommand.

    Attributes:
        names: Its spellings.
        summary: One line of help.
        takes_value: Whether a value follows.
        values: The values that it takes, if they are known.
        is_file: Whether the value is a path.
    """

    names: tuple[str, ...]
    summary: str
    takes_value: bool
    values: tuple[str, ...] = ()
    is_file: bool = False


@dataclass(frozen=True, slots=True)
class Words:
    """What can follow one subcommand.

    Attributes:
        name: Of the subcommand, maybe of two words.
        summary: One line of help.
        flags: Its flags.
        values: Positional arguments that it takes, if they are known.
        takes_files: Whether they may be paths.
    """

    name: str
    summary: str
    flags: tuple[Flag, ...]
    values: tuple[str, ...] = ()
    takes_files: bool = False


def run(context: CommandContext) -> int:
    """Print the script of a shell.

    Raises:
        SettingsError: No shell is named, or one that there is no script for.
    """
    known = ", ".join(SCRIPTS)
    if len(context.positionals) != 1 or context.positionals[0] not in SCRIPTS:
        given = " ".join(context.positionals) or "SHELL"
        raise SettingsError(f"minisgl completion {given}: name one shell of {known}")
    sys.stdout.write(SCRIPTS[context.positionals[0]](commands(context.plugins)))
    return 0


def commands(plugins: PluginManager) -> list[Words]:
    """Describe every subcommand that is installed; imports nothing heavy.

    One whose flags cannot be had is left out with a warning.
    """
    tree = plugins.settings_tree()
    backends = {flag: plugins.names(kind) for kind, flag in KINDS.items() if flag[:2] == "--"}
    ordered = sorted(plugins.commands.values(), key=lambda each: each.name)
    found = []
    for command in ordered:
        try:
            parser = build_parser(plugins, command, tree if command.has_settings else None)
        except PluginError as error:
            logger.warning("%s; it is left out, see `minisgl plugins doctor`", error)
            continue
        flags = tuple(_flags(parser._actions, tree, backends))
        found.append(_words(command, flags))
    return found


def _words(command: Subcommand, flags: tuple[Flag, ...]) -> Words:
    # A plain word in lower case is one to type; PROMPT stands for something.
    words = [word for word in command.positionals.split() if word.islower()]
    values = ("demo",) if command.has_model_argument else tuple(words)
    if command.name == "completion":
        values = tuple(SCRIPTS)
    return Words(command.name, command.summary, flags, values, command.has_model_argument)


def _flags(
    actions: list[Action], tree: SettingsTree, backends: Mapping[str, list[str]]
) -> Iterator[Flag]:
    for action in actions:
        if not action.option_strings:
            continue
        names = tuple(action.option_strings)
        option = tree.by_flag.get(names[0])
        values = tuple(str(choice) for choice in action.choices or ())
        is_file = action.metavar in _FILES
        if option is not None:
            is_file = option.name in _FILE_OPTIONS
            values = choices_of(option.info)
            if is_optional(option.info) and values:
                values = (*values, "auto")
        if names[0] in backends:
            values = ("auto", *backends[names[0]])
        if "--model" in names:
            values = ("demo",)
        summary = (action.help or "").replace("%%", "%").partition(" [")[0]
        yield Flag(names, summary, action.nargs != 0, values, is_file)
