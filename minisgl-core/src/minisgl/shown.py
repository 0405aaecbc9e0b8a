"""Values in messages."""

from __future__ import annotations

_MAX_CHARS = 100


def shown(value: object) -> str:
    """Write a value that was refused, however long it is.

    Python refuses to write an integer of very many digits; of such a one the type is told.
    """
    try:
        text = repr(value)
    except ValueError:
        return f"of type {type(value).__name__}, too long to show"
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}..."
