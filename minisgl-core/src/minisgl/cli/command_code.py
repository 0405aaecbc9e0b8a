"""Running the code of a subcommand so that what it raises names its plugin."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from minisgl.config.arguments import add_settings
from minisgl.config.tree import SettingsTree
from minisgl.errors import MinisglError, PluginError
from minisgl.plugin.commands import Subcommand
from minisgl.plugin.isolation import Failure, contain, describe
from minisgl.plugin.manager import PluginManager
from minisgl.plugin.selection import import_factory

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


def run_command(plugins: PluginManager, command: Subcommand, action: Callable[[], object]) -> int:
    """Run a subcommand.

    Args:
        plugins: Know whose it is.
        command: The subcommand.
        action: Calls what `import_code` returned.

    Returns:
        Its exit code.

    Raises:
        PluginError: It raised what is no error of ours, or returned something else; the message
            names subcommand, distribution and cause.
    """
    code = run_code(plugins, command, action)
    if not isinstance(code, int):
        raise _named(plugins, command, f"returned {code!r:.80}, which is not an exit code")
    return code


def import_code(
    plugins: PluginManager, command: Subcommand, place: str
) -> Callable[..., Any]:  # Any: run and complete_settings return different things
    """Import a function that a subcommand names.

    Args:
        plugins: Know whose it is.
        command: The subcommand.
        place: Its ``"package.module:function"``.

    Raises:
        PluginError: It cannot be imported; the message names subcommand, distribution and cause.
    """
    try:
        return contain(partial(import_factory, place))
    except PluginError as error:
        advice = f"reinstall or uninstall {plugins.owners[command.name].distribution}"
        raise _named(plugins, command, f"{error}; {advice}") from error.__cause__


def run_code(plugins: PluginManager, command: Subcommand, action: Callable[[], _Result]) -> _Result:
    """Run code of a subcommand.

    Errors of ours, an exit, an interrupt and a closed pipe pass as they are.

    Raises:
        PluginError: It raised anything else; the message names subcommand, distribution and cause,
            and the traceback is in the log.
    """
    try:
        return action()
    except (MinisglError, SystemExit, KeyboardInterrupt, BrokenPipeError):
        raise
    except BaseException as error:
        logger.error("what the subcommand %r raised", command.name, exc_info=error)
        raise _named(plugins, command, describe(error)) from error


def fill_parser(
    plugins: PluginManager,
    command: Subcommand,
    parser: argparse.ArgumentParser,
    tree: SettingsTree | None,
) -> None:
    """Add the flags of a subcommand, and of the settings tree where it takes settings.

    Raises:
        PluginError: Its own flags cannot be added or shown, or clash with the others; the message
            names subcommand, distribution and cause.
    """

    def fill() -> None:
        if command.add_arguments is not None:
            command.add_arguments(parser)
        if tree is not None:
            add_settings(parser, tree, command.name)
        parser.format_help()  # fails where a text has a stray '%'

    try:
        contain(fill)
    except PluginError as error:
        reason = f"its flags cannot be added: {error}"
        raise _named(plugins, command, reason) from error.__cause__


def _named(plugins: PluginManager, command: Subcommand, reason: str) -> PluginError:
    offer = plugins.owners[command.name]
    subject = f"subcommand {command.name!r}"
    return PluginError(str(Failure(subject, offer.distribution, offer.version, reason)))
