"""``minisgl version``."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from minisgl.plugin.commands import CommandContext

LIBRARIES = ("torch", "transformers", "pydantic", "pluggy")


def run(context: CommandContext) -> int:
    """Print the versions that a bug report needs; nothing is imported for it."""
    rows = {**dict(sorted(context.plugins.catalog.versions.items()))}
    rows["python"] = platform.python_version()
    for name in LIBRARIES:
        try:
            rows[name] = version(name)
        except PackageNotFoundError:
            rows[name] = "not installed"
    width = max(map(len, rows))
    sys.stdout.writelines(f"{name:<{width}}  {number}\n" for name, number in rows.items())
    return 0
