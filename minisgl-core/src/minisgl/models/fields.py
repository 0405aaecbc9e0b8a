"""Typed look-ups in a config.json, with errors that name the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minisgl.errors import ModelError


class Fields:
    """A config.json over the defaults of its family; ``null`` counts as the caller's default."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        """Look up in ``config``; fields that it lacks altogether come from ``defaults``."""
        self._config = config
        self._defaults = defaults

    def __contains__(self, key: str) -> bool:
        """Whether the JSON itself has the field."""
        return key in self._config

    def get(self, key: str, default: Any = None) -> Any:  # JSON of any type
        """Return the value as it is, or ``default`` where it is absent or null."""
        value = self._config.get(key, self._defaults.get(key))
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        """Return an int of at least ``minimum``; without a default the field is required.

        Raises:
            ModelError: It is missing or not such a number.
        """
        value = self.get(key, default)
        if value is None:
            raise ModelError(f"config.json: {key} is missing")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ModelError(
                f"config.json: {key} {value!r}: must be an integer of at least {minimum}"
            )
        return value

    def optional_integer(self, key: str) -> int | None:
        """Return a positive int, or ``None`` where the field is absent or null."""
        return None if self.get(key) is None else self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number; without a default the field is required.

        Raises:
            ModelError: It is missing or not such a number.
        """
        value = self.get(key, default)
        if value is None:
            raise ModelError(f"config.json: {key} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ModelError(f"config.json: {key} {value!r}: must be a number above 0")
        return float(value)

    def boolean(self, key: str) -> bool:
        """Return a flag, False where it is absent or null."""
        value = self.get(key, False)
        if not isinstance(value, bool):
            raise ModelError(f"config.json: {key} {value!r}: must be true or false")
        return value
