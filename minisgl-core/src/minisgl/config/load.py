"""Fill the settings tree: flag or keyword over environment over file over default.

Every value remembers where it came from, so that an error names what the user typed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from minisgl.config.fields import base_type, from_text, is_list, setting_of
from minisgl.config.file import read_file
from minisgl.config.sections import (
    BackendSettings,
    EngineSettings,
    ModelSettings,
    SchedulerSettings,
)
from minisgl.config.tree import (
    ENV_PREFIX,
    RESERVED_VARIABLES,
    Option,
    Section,
    SettingsTree,
    nearest,
)
from minisgl.errors import SettingsError

_Section = TypeVar("_Section", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Given:
    """A value as the user gave it.

    Attributes:
        value: Text from flags and variables, any object from files and keywords.
        origin: What the user typed: ``--page-size``, ``MINISGL_PAGE_SIZE``,
            ``settings.yaml: page_size`` or the keyword.
        is_text: Whether ``value`` still has to be split and parsed.
    """

    value: object
    origin: str
    is_text: bool = False


@dataclass(frozen=True, slots=True)
class Settings:
    """The filled tree; immutable, and can be sent to a spawned process.

    Attributes:
        flat: Instances of the flat sections, by class.
        by_owner: Instances of backends' sections, by ``SelectedBackend.key``.
        given: Validated values of what was not left to its default, by `Option.path`.
        origins: Where each of these came from.
    """

    flat: Mapping[type[BaseModel], BaseModel]
    by_owner: Mapping[str, BaseModel]
    given: Mapping[str, Any]  # Any: fields have any type
    origins: Mapping[str, str]

    def section(self, model: type[_Section]) -> _Section:
        """Return the flat section of a class, such as ``EngineSettings``."""
        found = self.flat[model]
        assert isinstance(found, model), f"{model.__name__} is filed under another class"
        return found

    def plugin(self, owner: str) -> BaseModel | None:
        """Return the section of the backend with this ``SelectedBackend.key``, if it has one."""
        return self.by_owner.get(owner)

    @property
    def model(self) -> ModelSettings:
        """Which model runs."""
        return self.section(ModelSettings)

    @property
    def backends(self) -> BackendSettings:
        """Which backend of each kind is used."""
        return self.section(BackendSettings)

    @property
    def engine(self) -> EngineSettings:
        """Device, memory and parallelism."""
        return self.section(EngineSettings)

    @property
    def scheduler(self) -> SchedulerSettings:
        """What runs when."""
        return self.section(SchedulerSettings)


def load_settings(
    tree: SettingsTree,
    given: Mapping[str, Given] | None = None,
    *,
    env: Mapping[str, str],
    config: str | Path | None = None,
) -> Settings:
    """Fill a tree from flags or keywords, the environment and a file.

    Args:
        tree: What exists.
        given: Flags or keywords, by `Option.path`; they win.
        env: The environment, ``os.environ`` or what a test makes of it.
        config: A ``.yaml``, ``.yml`` or ``.toml`` file; default ``MINISGL_CONFIG``.

    Raises:
        SettingsError: A name is unknown or a value is not allowed; the message has one line for
            each, which names the flag, variable, key or keyword, the value and what is allowed.
    """
    path = config if config is not None else env.get("MINISGL_CONFIG") or None
    problems: list[str] = []
    merged: dict[str, Given] = {}
    if path is not None:
        merged.update(_from_file(tree, Path(path), problems))
    merged.update(_from_env(tree, env, problems))
    merged.update(given or {})
    instances = {
        (section.key, section.model): _fill(section, merged, problems) for section in tree.sections
    }
    if problems:
        raise SettingsError("\n".join(problems))
    return _settings(tree, merged, instances)


def load_keywords(
    tree: SettingsTree, keywords: Mapping[str, Any], *, env: Mapping[str, str]
) -> Settings:
    """Fill a tree from Python keywords over the environment; ``config=`` names a file.

    A backend's section is given as a mapping under its name, ``fa={"num_splits": 4}``. A keyword
    that is ``None`` counts as not given.

    Raises:
        SettingsError: As for `load_settings`; the message names the keyword.
    """
    given: dict[str, Given] = {}
    problems: list[str] = []
    rest = {key: value for key, value in keywords.items() if key != "config" and value is not None}
    for path, value, origin in _flatten(tree, rest):
        option = tree.by_keyword.get(path)
        if option is None:
            problems.append(_unknown(tree, origin, value, "setting", tree.by_keyword))
        elif option.path in given:
            problems.append(f"{origin}: is the same setting as {given[option.path].origin}")
        else:
            given[option.path] = Given(value, origin)
    if problems:
        raise SettingsError("\n".join(problems))
    return load_settings(tree, given, env=env, config=keywords.get("config"))


def _from_env(
    tree: SettingsTree, env: Mapping[str, str], problems: list[str]
) -> Iterator[tuple[str, Given]]:
    for name, text in env.items():
        if not name.startswith(ENV_PREFIX) or name in RESERVED_VARIABLES:
            continue
        if option := tree.by_variable.get(name):
            yield option.path, Given(text, name, is_text=True)
        else:
            known = (*tree.by_variable, *RESERVED_VARIABLES)
            problems.append(f"{name}: unknown environment variable{nearest(name, known)}")


def _from_file(tree: SettingsTree, path: Path, problems: list[str]) -> Iterator[tuple[str, Given]]:
    for key, value, _ in _flatten(tree, read_file(path)):
        if option := tree.by_path.get(key):
            yield option.path, Given(value, f"{path}: {key}")
        else:
            problems.append(f"{path}: {_unknown(tree, key, value, 'key', tree.by_path)}")


def _unknown(tree: SettingsTree, name: str, value: object, what: str, known: Iterable[str]) -> str:
    """Say that a name is none of a setting; a section's own name is known, but takes no value."""
    bare = name.replace("-", "_")
    if any(bare == section.key.replace("-", "_") for section in tree.sections):
        return f"{name} {value}: must be a mapping of the settings of {name}"
    return f"{name}: unknown {what}{nearest(bare, known)}"


def _flatten(tree: SettingsTree, content: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield (path, value, key as written); a mapping under a section's key is its fields.

    A section's key with nothing below it, as when all is commented out, gives nothing.
    """
    keys = {section.key.replace("-", "_"): section.key for section in tree.sections if section.key}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name in keys and isinstance(value, Mapping):
            for inner, item in value.items():
                path = f"{keys[name]}.{str(inner).replace('-', '_')}"
                yield path, item, f"{key}.{inner}"
        elif name not in keys or value is not None:
            yield name, value, key


def _fill(section: Section, merged: Mapping[str, Given], problems: list[str]) -> BaseModel | None:
    """Validate one section; problems are added to the list."""
    options = {option.name: option for option in section.options()}
    values = {
        name: _prepared(option, merged[option.path], problems)
        for name, option in options.items()
        if option.path in merged
    }
    try:
        return section.model.model_validate(values)
    except ValidationError as error:
        bad: dict[str, ErrorDetails] = {}
        for detail in error.errors():
            bad.setdefault(str(detail["loc"][0]) if detail["loc"] else "", detail)
        problems += [_describe(section, options.get(n), d, merged) for n, d in bad.items()]
        return None


def _prepared(option: Option, given: Given, problems: list[str]) -> object:
    """Return what the model is given; a boolean is refused where a number is wanted."""
    if given.is_text:
        return from_text(str(given.value), option.info)
    if isinstance(given.value, bool) and base_type(option.info) in (int, float):
        problems.append(f"{given.origin} {given.value}: must be {option.allowed}")
    if is_list(option.info) and isinstance(given.value, str):
        return from_text(given.value, option.info)
    return given.value


def _describe(
    section: Section, option: Option | None, detail: ErrorDetails, merged: Mapping[str, Given]
) -> str:
    """Say where a value came from, what it is, and what would do."""
    if option is None:
        return f"{section.key or section.model.__name__}: {_reason(detail)}"
    if option.path not in merged:
        # A required field, or a plugin whose default fails its own bounds.
        names = f"{option.flags[0]}, {option.variable} or the key {option.path}"
        reason = "is missing" if detail["type"] == "missing" else f"default: {detail['msg']}"
        return f"{option.path}: {reason}; give it as {names}"
    given = merged[option.path]
    is_custom = detail["type"] in ("value_error", "assertion_error")
    wanted = _reason(detail) if is_custom else f"must be {option.allowed}"
    return f"{_shown(option, given)}: {wanted}"


def _shown(option: Option, given: Given) -> str:
    """Return a value after where it came from, so that an empty one can be seen as well."""
    if setting_of(option.info).is_secret:
        return given.origin
    text = "null" if given.value is None else str(given.value)
    return f"{given.origin} {text if text.strip() else repr(text)}"


def _reason(detail: ErrorDetails) -> str:
    """Return the text of a validator's own error."""
    return detail["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")


def _settings(
    tree: SettingsTree,
    merged: Mapping[str, Given],
    instances: Mapping[tuple[str, type[BaseModel]], BaseModel | None],
) -> Settings:
    """Put validated sections into the shape that their readers use."""
    flat: dict[type[BaseModel], BaseModel] = {}
    by_owner: dict[str, BaseModel] = {}
    given: dict[str, Any] = {}  # Any: fields have any type
    for section in tree.sections:
        instance = instances[section.key, section.model]
        assert instance is not None, "an invalid section was reported above"
        for option in section.options():
            if option.path in merged:
                given[option.path] = getattr(instance, option.name)
        if section.key:
            by_owner.update(dict.fromkeys(section.owners, instance))
        else:
            flat[section.model] = instance
    origins = {path: merged[path].origin for path in given}
    return Settings(flat=flat, by_owner=by_owner, given=given, origins=origins)
