"""Which settings exist here: sections of the core, of commands and of installed backends.

The tree knows every option by all of its names; `minisgl.config.load` fills it with values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from minisgl.config.fields import allowed_values, setting_of
from minisgl.config.sections import CORE_SECTIONS
from minisgl.errors import PluginError

ENV_PREFIX = "MINISGL_"
RESERVED_VARIABLES = ("MINISGL_CONFIG", "MINISGL_PLUGINS")
"""Variables that are read before there is a tree: the settings file and the plugin list."""


@dataclass(frozen=True, slots=True)
class Section:
    """One owner's settings.

    Attributes:
        model: The pydantic model.
        key: Prefix of its options, a backend's name; empty for flat sections.
        owners: Keys of the backends that read it (``SelectedBackend.key``); empty for flat ones.
        commands: Commands that have its flags; empty for every command that runs an engine.
            Environment variables and file keys are known to all commands alike, so that they can
            share one environment and one file.
    """

    model: type[BaseModel]
    key: str = ""
    owners: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()

    def options(self) -> tuple[Option, ...]:
        """Return the section's options in the order in which the model has them."""
        return tuple(Option(self, name, info) for name, info in self.model.model_fields.items())


@dataclass(frozen=True, slots=True)
class Option:
    """One setting under all of its names.

    Attributes:
        section: Where it belongs.
        name: Field of the section's model.
        info: What pydantic knows about the field.
    """

    section: Section
    name: str
    info: FieldInfo

    @property
    def path(self) -> str:
        """The one name that is unique in the tree: ``page_size`` or ``fa.num_splits``."""
        return f"{self.section.key}.{self.name}" if self.section.key else self.name

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of the command line, the main one first."""
        dashed = self.name.replace("_", "-")
        main = f"--{self.section.key}.{dashed}" if self.section.key else f"--{dashed}"
        return (main, *setting_of(self.info).flags)

    @property
    def variable(self) -> str:
        """The environment variable."""
        parts = [self.section.key, self.name] if self.section.key else [self.name]
        return ENV_PREFIX + "__".join(re.sub(r"\W", "_", part).upper() for part in parts)

    @property
    def keywords(self) -> tuple[str, ...]:
        """Keyword names from Python, the main one first."""
        return (self.path, *setting_of(self.info).keywords)

    @property
    def allowed(self) -> str:
        """What values it takes, in words."""
        return allowed_values(self.info)

    @property
    def default(self) -> Any:  # Any: fields have any type
        """Its default, or `PydanticUndefined` where a value is needed."""
        return PydanticUndefined if self.info.is_required() else self.info.get_default()


@dataclass(frozen=True, slots=True)
class SettingsTree:
    """Every option that can be set in this process.

    Attributes:
        sections: The core's, then those of commands and backends.
        by_path: Options by `Option.path`.
        by_variable: Options by environment variable.
        by_keyword: Options by each of their Python names.
        by_flag: Options by each of their flags.
    """

    sections: tuple[Section, ...]
    by_path: dict[str, Option] = field(default_factory=dict)
    by_variable: dict[str, Option] = field(default_factory=dict)
    by_keyword: dict[str, Option] = field(default_factory=dict)
    by_flag: dict[str, Option] = field(default_factory=dict)

    @classmethod
    def build(cls, extra: Iterable[Section] = ()) -> SettingsTree:
        """Make the tree of the core's sections and ``extra`` ones.

        Raises:
            PluginError: Two options have a name in common; the message names both owners.
        """
        tree = cls((*(Section(model) for model in CORE_SECTIONS), *extra))
        for option in tree.options():
            _enter(tree.by_path, [option.path], option)
            _enter(tree.by_variable, [option.variable], option)
            _enter(tree.by_keyword, option.keywords, option)
            _enter(tree.by_flag, option.flags, option)
        return tree

    def options(self, command: str = "") -> Iterator[Option]:
        """Yield all options, or those that ``command`` has flags for."""
        for section in self.sections:
            if not command or not section.commands or command in section.commands:
                yield from section.options()


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean X"`` for the known name that is most like ``name``, or nothing."""
    # What all names begin with would make any two of them look alike.
    bare = {candidate.removeprefix(ENV_PREFIX): candidate for candidate in known}
    close = get_close_matches(name.removeprefix(ENV_PREFIX), list(bare), n=1, cutoff=0.6)
    return f"; did you mean {bare[close[0]]}" if close else ""


def _enter(index: dict[str, Option], names: Iterable[str], option: Option) -> None:
    """Add an option under its names, none of which may be taken."""
    for name in names:
        if name in index:
            owners = " and ".join(_owner(each) for each in (index[name], option))
            raise PluginError(f"{name}: is a setting of both {owners}; rename one")
        index[name] = option


def _owner(option: Option) -> str:
    section = option.section
    return ", ".join(section.owners) or f"{section.model.__module__}.{section.model.__name__}"
