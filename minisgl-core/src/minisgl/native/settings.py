"""What the environment says about compilers and where compiled code is kept."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

_USUAL_COMPILERS = ("c++", "g++", "clang++")


def compiler_commands() -> tuple[tuple[str, ...], ...]:
    """Return the commands to try, the best first: ``$CXX`` alone where it is set."""
    wanted = shlex.split(os.environ.get("CXX", ""))
    return (tuple(wanted),) if wanted else tuple((name,) for name in _USUAL_COMPILERS)


def cache_folder() -> Path:
    """Return the folder of compiled code in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "minisgl" / "native"
