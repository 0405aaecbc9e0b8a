"""Finds stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text on, except what is, or may yet become, a stop string.

    Where text is cut does not depend on how it is split into pieces: the stop string that is
    complete first counts, and of those that are complete at the same character the longest.

    Attributes:
        matched: The stop string that was found, or ``None``.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Look for any of ``stops``, non-empty strings."""
        self._stops = tuple(stops)
        self._held = ""  # the end of the text so far, a proper prefix of a stop string
        self._num_early = 0  # characters at the start of what is held in which no match may end
        self.matched: str | None = None

    def push(self, text: str, num_early: int = 0) -> str:
        """Take the next piece and return what can be shown; nothing once a stop was found.

        Args:
            text: The piece.
            num_early: So many characters at its start end no stop string; one may begin in them.
        """
        if self.matched is not None:
            return ""
        if not self._stops or not text:
            return text
        if num_early:
            self._num_early = len(self._held) + num_early
        text = self._held + text
        found = self._first_match(text)
        if found is not None:
            start, self.matched = found
            self._held = ""
            return text[:start]
        num_held = max(_overlap(text, stop) for stop in self._stops)
        shown = len(text) - num_held
        self._held = text[shown:]
        self._num_early = max(0, self._num_early - shown)
        return text[:shown]

    def finish(self) -> str:
        """Return what was held back in vain."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """Return start and string of the match that ends first."""
        matches = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop, max(0, self._num_early + 1 - len(stop)))) >= 0
        ]
        if not matches:
            return None
        _, start, stop = min(matches)
        return start, stop


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
