"""What a distribution offers as a subcommand of ``minisgl``."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import BaseModel

    from minisgl.config.load import Settings
    from minisgl.plugin.manager import PluginManager


@dataclass(frozen=True, slots=True)
class CommandContext:
    """What a subcommand runs with.

    Attributes:
        plugins: The plugins of this process.
        arguments: What its own arguments parsed to.
        positionals: Its positional arguments, without MODEL.
        settings: The filled settings tree, or ``None`` where ``has_settings`` is False.
    """

    plugins: PluginManager
    arguments: Namespace
    positionals: tuple[str, ...]
    settings: Settings | None

    @property
    def filled_settings(self) -> Settings:
        """The settings of a command that has them."""
        assert self.settings is not None, "the command does not take settings"
        return self.settings


@dataclass(frozen=True, slots=True)
class Subcommand:
    """A subcommand; plain data, so that ``minisgl --help`` imports nothing heavy.

    Attributes:
        name: What the user types after ``minisgl``.
        summary: One line of help, lower case.
        run: ``"package.module:function"`` of a function that takes a `CommandContext` and returns
            the exit code; imported only when the command runs.
        has_settings: Whether it takes the flags of the settings tree.
        has_model_argument: Whether the first positional argument is MODEL where neither
            ``--model`` nor environment or file name one.
        positionals: What help calls its other positional arguments; empty when it takes none.
        sections: Flat settings sections of its own, such as host and port of a server. All their
            fields need defaults, because every command reads the same environment and file.
        add_arguments: Adds flags that are no settings, such as ``--json``.
        complete_settings: ``"package.module:function"`` that brings settings of its own, for a
            command that finds them in a file. It is given the positional arguments, the flags by
            `Option.path` and the settings tree, and returns what the tree is filled with.
    """

    name: str
    summary: str
    run: str
    has_settings: bool = False
    has_model_argument: bool = False
    positionals: str = ""
    sections: tuple[type[BaseModel], ...] = ()
    add_arguments: Callable[[ArgumentParser], None] | None = None
    complete_settings: str = ""
