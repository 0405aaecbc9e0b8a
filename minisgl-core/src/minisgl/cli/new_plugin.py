"""``minisgl plugins new KIND NAME``: writes a plugin that installs, passes its tests and works."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from unicodedata import category

from minisgl.cli.plugin_kinds import PLUGIN_KINDS
from minisgl.cli.plugin_names import PluginNames, find_kind, make_names, refuse_taken
from minisgl.cli.plugin_template import LICENSES, render_files
from minisgl.errors import SettingsError
from minisgl.plugin.commands import CommandContext

_UNWRITABLE = frozenset(("Cc", "Cs"))  # the latter: bytes that are no UTF-8


def run(context: CommandContext) -> int:
    """Write a distribution into a folder of its own, and say what to do next.

    Raises:
        SettingsError: A name cannot be used or is taken, or the folder exists or cannot be
            written. Nothing was written then, but in the last case.
    """
    arguments = context.arguments
    if len(context.positionals) != 2:
        kinds = ", ".join(PLUGIN_KINDS)
        raise SettingsError(f"minisgl plugins new: needs KIND and NAME; kinds: {kinds}")
    kind, name = context.positionals
    if arguments.license not in LICENSES:
        allowed = ", ".join(LICENSES)
        raise SettingsError(f"--license {arguments.license}: must be one of {allowed}")
    for flag, text in (("--author", arguments.author or ""), ("--dir", arguments.dir)):
        if _UNWRITABLE & {category(letter) for letter in text}:
            raise SettingsError(f"{flag} {text!r}: must be UTF-8 without control characters")
    names = make_names(find_kind(kind), name, arguments.distribution)
    refuse_taken(names, context.plugins)
    author = arguments.author or f"The {names.distribution} authors"
    rendered = render_files(names, arguments.license, author)
    folder = write_files(Path(arguments.dir) / names.distribution, rendered)
    _report(names, folder, list(rendered), arguments.json)
    return 0


def write_files(folder: Path, rendered: dict[str, str]) -> Path:
    """Write files into a folder that does not exist yet.

    Raises:
        SettingsError: It exists, or cannot be written.
    """
    try:
        if folder.exists() or folder.is_symlink():
            raise SettingsError(
                f"--dir {folder.parent}: holds {folder.name} already; nothing is written"
            )
        for path, text in rendered.items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--dir {folder.parent}: cannot be written: {error}") from error
    return folder


def _report(names: PluginNames, folder: Path, files: list[str], is_json: bool) -> None:
    """Say what was written, and the next three commands."""
    place = shlex.quote(str(folder))
    steps = {
        "install it": f"pip install --editable {shlex.quote(f'{folder}[test]')}",
        "test it": f"pytest {place}",
        "see it": "minisgl plugins",
    }
    if is_json:
        document = {
            "folder": str(folder.resolve()),
            "kind": names.kind.kind,
            "name": names.name,
            "distribution": names.distribution,
            "package": names.package,
            "files": files,
            "next": list(steps.values()),
        }
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        return
    lines = [f"{folder}: {names.kind.phrase}, {names.kind.summary}", ""]
    lines += [f"  {path}" for path in files]
    lines += ["", *(f"{why + ':':<12} {step}" for why, step in steps.items())]
    lines += [f"change it:   {folder / 'README.md'} says where"]
    sys.stdout.writelines(f"{line}\n" for line in lines)
