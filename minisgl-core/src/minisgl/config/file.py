"""Settings files: YAML or TOML, parsed and checked for their shape."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from minisgl.errors import SettingsError

_DEEPEST = 32  # levels of lists and mappings


def read_file(path: Path) -> dict[str, Any]:  # Any: parsed YAML or TOML
    """Read a settings file.

    Raises:
        SettingsError: It cannot be read or parsed, or does not hold a mapping. The message has one
            line.
    """
    if path.suffix not in (".yaml", ".yml", ".toml"):
        raise SettingsError(f"--config {path}: must be a .yaml, .yml or .toml file")
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
        is_deep = _is_deeper(content, _DEEPEST)
    # Dates, numbers and depth make the parsers fail in ways of their own.
    except Exception as error:
        raise SettingsError(f"--config {path}: cannot be read: {_reason(error)}") from error
    if is_deep:  # or holds itself, by an alias of YAML
        raise SettingsError(f"--config {path}: must have at most {_DEEPEST} levels")
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise SettingsError(f"--config {path}: must hold a mapping of setting names to values")
    return content


def _is_deeper(value: object, levels: int) -> bool:
    """Whether lists and mappings are nested in more than ``levels`` levels."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return False
    return levels == 0 or any(_is_deeper(item, levels - 1) for item in value)


def _reason(error: Exception) -> str:
    """Say in one line what a parser found, and where."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    mark = getattr(error, "problem_mark", None)  # of most errors of YAML
    if mark is not None:
        problem = getattr(error, "problem", None) or "it is no YAML"
        return f"line {mark.line + 1}, column {mark.column + 1}: {' '.join(problem.split())}"
    return " ".join(str(error).split())
