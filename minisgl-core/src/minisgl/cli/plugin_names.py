"""The names of a new plugin: what the user asked for, what follows from it, and what is taken."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution
from importlib.util import find_spec
from keyword import iskeyword

from minisgl.cli.plugin_kinds import PLUGIN_KINDS, PluginKind
from minisgl.config.sections import CORE_SECTIONS
from minisgl.config.tree import nearest
from minisgl.errors import SettingsError
from minisgl.plugin.discovery import HOOK_GROUP, normalize
from minisgl.plugin.manager import PluginManager

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_CLASS = re.compile(r"[A-Z][A-Za-z0-9]*")
_DISTRIBUTION = re.compile(r"[A-Za-z]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_RESERVED = ("auto", "none")
_LONGEST_NAME = 100
_LONGEST_DISTRIBUTION = 200  # with an ending it is the name of a file, which has 255 bytes at most


@dataclass(frozen=True, slots=True)
class PluginNames:
    """Everything that a new plugin is called.

    Attributes:
        kind: What it is.
        name: What users pick it by: the entry point's name.
        distribution: What is installed, normalised; also the folder.
        package: What is imported.
        class_name: The class behind it.
    """

    kind: PluginKind
    name: str
    distribution: str
    package: str
    class_name: str


def find_kind(text: str) -> PluginKind:
    """Return the kind that the user typed; dashes count as underscores.

    Raises:
        SettingsError: There is none.
    """
    kind = text.replace("-", "_")
    if kind not in PLUGIN_KINDS:
        known = ", ".join(PLUGIN_KINDS)
        raise SettingsError(f"KIND {text}: must be one of {known}{nearest(kind, PLUGIN_KINDS)}")
    return PLUGIN_KINDS[kind]


def make_names(kind: PluginKind, name: str, distribution: str | None) -> PluginNames:
    """Derive all names from one.

    Args:
        kind: What is made.
        name: What the user typed.
        distribution: The distribution's name, or ``None`` for ``minisgl-<short kind>-<name>``.

    Raises:
        SettingsError: A name cannot be used.
    """
    _check_name(kind, name)
    words = _words(name.removesuffix("ForCausalLM") or name) if kind.is_class_name else [name]
    derived = distribution or "-".join(("minisgl", kind.short, *words))
    if not _DISTRIBUTION.fullmatch(derived):
        raise SettingsError(
            f"--distribution {derived}: must have letters, digits, '-', '_' and '.', start with a "
            "letter and end with a letter or digit"
        )
    if len(derived) > _LONGEST_DISTRIBUTION:
        limit = f"must have at most {_LONGEST_DISTRIBUTION} characters"
        raise SettingsError(f"--distribution {derived}: {limit}, has {len(derived)}")
    normal = normalize(derived)
    return PluginNames(kind, name, normal, normal.replace("-", "_"), _class_name(kind, name))


def refuse_taken(names: PluginNames, plugins: PluginManager) -> None:
    """See that nothing installed has one of the names already.

    Raises:
        SettingsError: Something has.
    """
    kind, name = names.kind, names.name
    if name in _taken(kind, plugins):
        raise SettingsError(
            f"NAME {name}: an installed distribution offers {kind.phrase} of this name; "
            "see `minisgl plugins`, and choose another one"
        )
    if any(True for _ in Distribution.discover(name=names.distribution)):
        raise SettingsError(
            f"--distribution {names.distribution}: is installed; choose another name"
        )
    package = names.package
    is_bad = iskeyword(package) or package in sys.stdlib_module_names
    if is_bad or find_spec(package) is not None:
        raise SettingsError(
            f"--distribution {names.distribution}: its package {package!r} would hide a module of "
            "that name; choose another one"
        )


def _check_name(kind: PluginKind, name: str) -> None:
    if len(name) > _LONGEST_NAME:
        raise SettingsError(
            f"NAME {name}: must have at most {_LONGEST_NAME} characters, has {len(name)}"
        )
    if kind.is_class_name:
        if not _CLASS.fullmatch(name):
            raise SettingsError(
                f"NAME {name}: a model is named by the class in config.json's architectures, such "
                f"as {kind.example}"
            )
        return
    if not _NAME.fullmatch(name):
        raise SettingsError(
            f"NAME {name}: must be lower-case letters and digits, in words joined by single "
            f"dashes, such as {kind.example}"
        )
    settings = {field for section in CORE_SECTIONS for field in section.model_fields}
    if name in (*_RESERVED, *kind.reserved) or name.replace("-", "_") in settings:
        raise SettingsError(f"NAME {name}: has a meaning of its own; choose another one")


def _taken(kind: PluginKind, plugins: PluginManager) -> Iterator[str]:
    """Yield the names of what is installed, aliases included."""
    yield from (offer.name for offer in plugins.catalog.hooks if kind.group == HOOK_GROUP)
    if kind.kind == "command":
        yield from plugins.commands
    offers = [offer for offer in plugins.catalog.offers if offer.kind == kind.kind]
    yield from (offer.name for offer in offers)
    for _, spec in plugins.specs.loadable(offers):
        yield from spec.aliases


def _class_name(kind: PluginKind, name: str) -> str:
    """Join the words, and the kind's own word where they do not end in it."""
    if kind.is_class_name:
        return name
    joined = "".join(word.capitalize() for word in name.split("-"))
    return joined if joined.lower().endswith(kind.suffix.lower()) else joined + kind.suffix


def _words(class_name: str) -> list[str]:
    """Cut ``MyModel2`` into ``my`` and ``model2``."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*|[0-9]+", class_name)
    return [part.lower() for part in parts]
