"""The entry of the ``minisgl`` command."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from minisgl.cli.parser import find_command, help_text, parse, split_command
from minisgl.errors import MinisglError, PluginError, RequestError, SettingsError
from minisgl.plugin.commands import CommandContext, Subcommand
from minisgl.plugin.discovery import CORE
from minisgl.plugin.manager import PluginManager

logger = logging.getLogger(__name__)

_Runner = Callable[[CommandContext], int]

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # what a shell reports for SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``minisgl``.

    Args:
        argv: Arguments without the program's name; default those of the process.

    Returns:
        0 when all went well, 1 when something failed, 2 when flags or their values are wrong, 130
        after an interrupt. An error of ours is one line on stderr, never a traceback.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    try:
        code = _run(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()  # here, where a reader that has gone is dealt with
        return code
    except SystemExit as end:  # argparse, after printing help
        return end.code if isinstance(end.code, int) else EXIT_FAILED
    except (SettingsError, RequestError) as error:
        return _complain(error, EXIT_USAGE)
    except MinisglError as error:
        return _complain(error, EXIT_FAILED)
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has gone; the interpreter must not fail again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _run(arguments: list[str]) -> int:
    plugins = PluginManager.bootstrap()
    if not plugins.commands:
        raise PluginError(f"the metadata of {CORE} are missing or stale; reinstall {CORE}")
    name, rest = split_command(arguments)
    if not name:
        sys.stdout.write(help_text(plugins.commands.values()))
        return 0 if arguments else EXIT_USAGE
    # A name may have two words, so that several distributions can offer parts of one subcommand.
    if rest and f"{name} {rest[0]}" in plugins.commands:
        name, rest = f"{name} {rest[0]}", rest[1:]
    command = find_command(plugins.commands, name)
    context = parse(plugins, command, rest)
    return _load(command)(context)


def _load(command: Subcommand) -> _Runner:
    """Import what runs a subcommand."""
    module, _, function = command.run.partition(":")
    runner: _Runner = getattr(import_module(module), function)
    return runner


def _complain(error: MinisglError, code: int) -> int:
    for line in str(error).splitlines():
        sys.stderr.write(f"minisgl: {line}\n")
    logger.debug("the error in full", exc_info=error)
    return code
