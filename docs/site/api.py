"""The list of everything public, ``docs/public-api.txt``, and what may change it.

Public are the modules that ``docs/public-modules.md`` names, the settings of every distribution,
the parameters of the HTTP API, and the names under which backends are registered.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from docs.site.surface import Class, Function, Member, Value, read_module

ROOT = Path(__file__).resolve().parents[2]
LISTING = ROOT / "docs" / "public-api.txt"
CHANGES = ROOT / "changelog.d"
CORE = ROOT / "minisgl-core" / "src"
LISTED = re.compile(r"^\| `(minisgl[\w.*]*)` \|", re.MULTILINE)
HEAD = "# Everything public, written by `make api`; docs/contributing.md says how it may change.\n"


def main() -> int:
    """Write the listing, if the changelog names all that differs from the one that is there.

    Returns:
        The exit code: 1, with what is missing on stderr, when it does not.
    """
    new = render()
    old = LISTING.read_text() if LISTING.exists() else new
    missing = unnamed(
        old, new, "\n".join(path.read_text() for path in sorted(CHANGES.glob("*.md")))
    )
    for name in missing:
        sys.stderr.write(
            f"{name}: has changed, and no file in changelog.d/ names it in backticks\n"
        )
    if not missing:
        LISTING.write_text(new)
    return 1 if missing else 0


def render() -> str:
    """Return the listing: a heading per module, and a line for everything in it."""
    parts = [HEAD, *(_section(name, path) for name, path in public_modules()), _entry_points()]
    return "\n".join(parts)


def unnamed(old: str, new: str, changelog: str) -> list[str]:
    """Return what differs between two listings and is not named in the changelog.

    It is named when it, its class, its module or a package around that stands in backticks; a
    setting also as its flag, ``--fa.num-splits``.
    """
    words = {
        word.strip("-.").replace("-", "_")
        for span in re.findall(r"`([^`]+)`", changelog)
        for word in re.findall(r"[\w.-]+", span)
    }
    words |= {word.rpartition(".")[2] for word in words}
    changed = {about for about, _ in set(_lines(old)) ^ set(_lines(new))}
    return [": ".join(about) for about in sorted(changed) if not words & _names(*about)]


def public_modules() -> list[tuple[str, Path]]:
    """Return every public module with its file, by name."""
    patterns = LISTED.findall((ROOT / "docs" / "public-modules.md").read_text())
    found = {
        _module_name(path, CORE): path
        for pattern in patterns
        for end in (".py", "/__init__.py")
        for path in CORE.glob(pattern.replace(".", "/").replace("*", "**/*") + end)
    }
    for source in sorted(ROOT.glob("minisgl-*/src")):
        for path in [*source.glob("*/settings.py"), *source.glob("*/api/schemas.py")]:
            found[_module_name(path, source)] = path
    found["minisgl.config.sections"] = CORE / "minisgl/config/sections.py"
    return sorted(found.items())


def _module_name(path: Path, source: Path) -> str:
    return ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")


def _section(name: str, path: Path) -> str:
    module = read_module(name, path)
    is_test = name.rpartition(".")[2].startswith("test_")  # run by name, never imported
    members = [] if is_test else [line for each in module.members for line in _member(each)]
    exports = [f"{each} (from elsewhere)" for each in module.exports]
    return "".join(f"{line}\n" for line in [f"## {name}", *members, *exports])


def _member(member: Member) -> Iterator[str]:
    if isinstance(member, Value) and member.annotation:
        yield f"{member.name}: {member.annotation}"  # a table's content may grow
        return
    if not isinstance(member, Class):
        yield member.declaration()
        return
    bases = f"({', '.join(member.bases)})" if member.bases else ""
    yield f"class {member.name}{bases}"
    parts: tuple[Value | Function, ...] = (*member.fields, *member.methods)
    for each in parts:
        yield f"    {each.declaration(owner=f'{member.name}.')}"


def _entry_points() -> str:
    lines = []
    for path in sorted(ROOT.glob("minisgl-*/pyproject.toml")):
        project = tomllib.loads(path.read_text())["project"]
        groups = {**project.get("entry-points", {}), "console_scripts": project.get("scripts", {})}
        lines += [f"{name}  # {group} of {path.parent.name}" for group, name in _pairs(groups)]
    return "".join(f"{line}\n" for line in ["## entry points", *sorted(lines)])


def _pairs(groups: Mapping[str, Iterable[str]]) -> Iterator[tuple[str, str]]:
    return ((group, name) for group, names in groups.items() for name in names)


def _lines(listing: str) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield each line of a listing with what it is about: module and ``Class.member``."""
    module = ""
    for line in listing.splitlines():
        if line.startswith("## "):
            module = line[3:]
        found = re.match(r" *(?:class |@\w+ )*([\w.-]+)", line)
        if found:
            yield (module, found[1]), line


def _names(module: str, name: str) -> set[str]:
    """Return what a changelog may call something: all of its names, and the packages around it."""
    parts = module.split(".")
    around = {".".join(parts[:end]) for end in range(2, len(parts) + 1)}
    return {name.replace("-", "_"), *name.replace("-", "_").split("."), *around}


if __name__ == "__main__":
    sys.exit(main())
