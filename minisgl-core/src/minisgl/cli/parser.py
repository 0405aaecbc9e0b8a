"""Command lines: finding the subcommand, and parsing what follows it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from minisgl.cli.command_code import fill_parser, import_code, run_code
from minisgl.config.arguments import given_settings
from minisgl.config.file import read_file
from minisgl.config.load import Given, load_settings
from minisgl.config.tree import SettingsTree, nearest
from minisgl.errors import SettingsError
from minisgl.plugin.commands import CommandContext, Subcommand
from minisgl.plugin.manager import PluginManager

DEFAULT_COMMAND = "serve"
"""What ``minisgl --model M`` means, as in the reference system."""

INSTALLABLE: Mapping[str, str] = {"serve": "minisgl-server", "chat": "minisgl-server"}
"""Who offers a subcommand that is not installed."""

_WORDS = "positional_words"


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are errors like all others, not an exit."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command line.

        Raises:
            SettingsError: Always.
        """
        raise SettingsError(f"{message}; see `{self.prog} --help`")


def split_command(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Return the subcommand's name, or nothing when help is wanted, and its arguments."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        return "", []
    if arguments[0] in ("-V", "--version"):
        return "version", []
    if arguments[0].startswith("-"):
        return DEFAULT_COMMAND, list(arguments)
    return arguments[0], list(arguments[1:])


def find_command(commands: Mapping[str, Subcommand], name: str) -> Subcommand:
    """Return a subcommand.

    Raises:
        SettingsError: There is none; the message says what would have to be installed.
    """
    if name in commands:
        return commands[name]
    if name in INSTALLABLE:
        provider = INSTALLABLE[name]
        raise SettingsError(
            f"{name}: needs {provider}, which is not installed; pip install {provider}"
        )
    known = ", ".join(sorted(commands))
    hint = nearest(name, commands)
    raise SettingsError(f"{name}: no such subcommand; installed: {known}{hint}")


def help_text(commands: Iterable[Subcommand]) -> str:
    """Return what ``minisgl --help`` prints."""
    parser = Parser(
        prog="minisgl",
        description="An LLM inference engine that assembles itself from installed plugins.",
        epilog="`minisgl SUBCOMMAND --help` shows the flags of one of them.",
        allow_abbrev=False,
    )
    parser.add_argument("-V", "--version", action="store_true", help="show versions and end")
    subparsers = parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND")
    for command in sorted(commands, key=lambda each: each.name):
        subparsers.add_parser(command.name, help=command.summary.replace("%", "%%"))
    return parser.format_help()


def build_parser(plugins: PluginManager, command: Subcommand, tree: SettingsTree | None) -> Parser:
    """Make the parser of one subcommand; ``tree`` is the settings tree where it takes settings.

    Raises:
        PluginError: The subcommand's own flags cannot be added.
    """
    model = "[MODEL] " if command.has_model_argument else ""
    words = f"{model}[{command.positionals} ...]" if command.positionals else model
    prog = f"minisgl {command.name}"
    parser = Parser(
        prog=prog,
        usage=f"{prog} {words.strip()} [flags]".replace("  ", " "),
        description=command.summary,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(_WORDS, nargs="*", help=argparse.SUPPRESS)
    fill_parser(plugins, command, parser, tree)
    return parser


def parse(plugins: PluginManager, command: Subcommand, arguments: Sequence[str]) -> CommandContext:
    """Parse a subcommand's arguments and fill its settings.

    Raises:
        SettingsError: A flag is unknown, or a value is not allowed.
        PluginError: Code of the subcommand fails.
    """
    tree = plugins.settings_tree() if command.has_settings else None
    parser = build_parser(plugins, command, tree)
    read = partial(parser.parse_known_intermixed_args, list(arguments))
    namespace, unknown = run_code(plugins, command, read)
    words = list(getattr(namespace, _WORDS))
    if unknown:
        raise SettingsError(_unknown(parser, command, tree, unknown[0]))
    context = CommandContext(plugins, namespace, (), None)
    if tree is not None:
        given = given_settings(namespace)
        if command.has_model_argument and words and not _has_model(given, namespace.config):
            given = {**given, "model": Given(words.pop(0), "MODEL")}
        if command.complete_settings:
            complete = import_code(plugins, command, command.complete_settings)
            given = run_code(plugins, command, partial(complete, words, given, tree))
        settings = load_settings(tree, given, env=os.environ, config=namespace.config)
        context = replace(context, settings=settings)
    if words and not command.positionals:
        raise SettingsError(f"{words[0]}: {parser.prog} takes no further argument")
    return replace(context, positionals=tuple(words))


def _has_model(given: Mapping[str, Given], config: str | None) -> bool:
    """Return whether a flag, the environment or the file names a model."""
    path = config or os.environ.get("MINISGL_CONFIG")
    is_in_file = path is not None and "model" in read_file(Path(path))
    return "model" in given or "MINISGL_MODEL" in os.environ or is_in_file


def _unknown(parser: Parser, command: Subcommand, tree: SettingsTree | None, argument: str) -> str:
    """Say that a flag is unknown here, and which one may have been meant."""
    flag = argument.partition("=")[0]
    own = [name for action in parser._actions for name in action.option_strings]
    option = tree.by_flag.get(flag) if tree is not None else None
    if option is not None:
        return f"{flag}: is a flag of minisgl {' and '.join(option.section.commands)}"
    return f"{flag}: unknown flag of minisgl {command.name}{nearest(flag, own)}"


class _HelpFormatter(argparse.HelpFormatter):
    """Leaves room for long flags."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)
