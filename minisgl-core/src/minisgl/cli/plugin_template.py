"""The files of a new plugin, made from the templates in this package's folder ``templates``.

A template is a file of the new distribution with ``$$name`` placeholders, as `string.Template` has
them, and ``.tmpl`` behind its name. ``templates/common`` goes into every plugin,
``templates/suite`` into those that have a conformance suite, ``templates/<kind>`` into those of a
kind. Files that end in ``.part`` are passages of the README.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.resources import files
from importlib.resources.abc import Traversable
from string import Template

from minisgl.cli.plugin_names import PluginNames
from minisgl.plugin.discovery import CORE

LICENSES = ("Apache-2.0", "MIT")
"""Licences whose text can be written."""

_SUFFIX = ".tmpl"


def render_files(names: PluginNames, license_id: str, author: str) -> dict[str, str]:
    """Make every file of a plugin.

    Args:
        names: What it is called.
        license_id: One of `LICENSES`.
        author: Whoever holds the rights.

    Returns:
        Text by path, relative to the distribution's folder, in alphabetical order.
    """
    values = _values(names, license_id, author)
    root = files(__package__).joinpath("templates")
    for part in ("usage", "develop"):
        values[part] = _render(root / names.kind.kind / f"{part}.md.part", values).strip()
    made = {"LICENSE": _render(root / "licenses" / f"{license_id}{_SUFFIX}", values)}
    for folder in ("common", *(["suite"] if names.kind.has_suite else []), names.kind.kind):
        for path, template in _walk(root / folder):
            made[Template(path).substitute(values)] = _render(template, values)
    return dict(sorted(made.items()))


def _values(names: PluginNames, license_id: str, author: str) -> dict[str, str]:
    """Return what the placeholders stand for."""
    kind = names.kind
    target = f"{names.package}.plugin" + (f":{kind.constant}" if kind.constant else "")
    requirements = sorted((f"{CORE}>={_core_release()}", *kind.requirements))
    pick = Template(kind.pick).substitute(name=names.name)
    return {
        "kind": kind.kind,
        "phrase": f"{kind.phrase[0].upper()}{kind.phrase[1:]}",
        "summary": kind.summary,
        "suite": f"{kind.kind}:{names.name}",
        "name": names.name,
        "distribution": names.distribution,
        "package": names.package,
        "class_name": names.class_name,
        "keyword": names.name.replace("-", "_"),
        "variable": names.name.replace("-", "_").upper(),
        "group": f'"{kind.group}"' if "." in kind.group else kind.group,
        "target": target,
        "pick": pick,
        "test_requirements": ", ".join(f'"{each}"' for each in kind.test_requirements),
        "requirements": "\n".join(f'    "{each}",' for each in requirements),
        "license": license_id,
        "author": author,
        "quoted_author": json.dumps(author, ensure_ascii=False),
        "year": str(datetime.now(UTC).year),
    }


def _core_release() -> str:
    """Return major and minor version of the core that is installed."""
    return ".".join(version(CORE).split(".")[:2])


def _walk(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, Traversable]]:
    """Yield the templates below a folder, by the path that they stand for."""
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _walk(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(_SUFFIX):
            yield prefix + entry.name.removesuffix(_SUFFIX), entry


def _render(template: Traversable, values: Mapping[str, str]) -> str:
    return Template(template.read_text(encoding="utf-8")).substitute(values)
