"""From a command line to what runs it; heavy next to `minisgl.cli.main`, which imports it late."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

from minisgl.cli.command_code import import_code, run_command
from minisgl.cli.parser import find_command, help_text, parse, split_command
from minisgl.cli.quiet_start import EXIT_USAGE
from minisgl.errors import PluginError
from minisgl.plugin.discovery import CORE
from minisgl.plugin.manager import PluginManager


def prepare(arguments: list[str]) -> Callable[[], int]:
    """Find what a command line means, and import it.

    Args:
        arguments: Those of the process, without the program's name.

    Returns:
        What runs it and returns the exit code.

    Raises:
        SettingsError: A flag, variable or key has a value that is not allowed.
        PluginError: There is no such subcommand, or it cannot be imported.
        SystemExit: Help was printed, or a flag is wrong.
    """
    plugins = PluginManager.bootstrap()
    if not plugins.commands:
        raise PluginError(f"the metadata of {CORE} are missing or stale; reinstall {CORE}")
    name, rest = split_command(arguments)
    if not name:
        return partial(_show_help, plugins, 0 if arguments else EXIT_USAGE)
    # A name may have two words, so that several distributions can offer parts of one subcommand.
    if rest and f"{name} {rest[0]}" in plugins.commands:
        name, rest = f"{name} {rest[0]}", rest[1:]
    command = find_command(plugins.commands, name)
    context = parse(plugins, command, rest)
    runner = import_code(plugins, command, command.run)
    return partial(run_command, plugins, command, partial(runner, context))


def _show_help(plugins: PluginManager, code: int) -> int:
    sys.stdout.write(help_text(plugins.commands.values()))
    return code
