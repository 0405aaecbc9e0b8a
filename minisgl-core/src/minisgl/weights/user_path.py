"""What a user typed after ``--model``, as a path."""

from __future__ import annotations

from pathlib import Path


def user_path(model: str) -> Path | None:
    """Return a string as a path with its ``~`` expanded, or ``None`` where it can't be one.

    Whatever is returned can be looked up: names that are empty or too long for the file system,
    and homes of unknown users, are no paths.
    """
    if not model.strip():
        return None
    try:
        path = Path(model).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError):
        return None
    return path
