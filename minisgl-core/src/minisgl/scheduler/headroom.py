"""How much room optimistic admission leaves for running requests to grow."""

from __future__ import annotations

_CALM_STEPS = 128  # decode steps without a retraction after which less room will do


class Headroom:
    """Tokens of room per running request: doubled by each retraction, and slowly given up again.

    With too little, requests are retracted and their KV computed again; with too much, memory
    lies idle. Which is which depends on how long the answers get, so it is learned.
    """

    def __init__(self, min_tokens: int) -> None:
        """Start with the least.

        Args:
            min_tokens: The least, at least 0.
        """
        self._min_tokens = min_tokens
        self._num_calm_steps = 0
        self.num_tokens = min_tokens

    def on_retraction(self, max_tokens: int) -> None:
        """Ask for more, ``max_tokens`` at most."""
        self._num_calm_steps = 0
        self.num_tokens = max(self._min_tokens, min(2 * max(self.num_tokens, 1), max_tokens))

    def on_decode(self) -> bool:
        """Account for a decode step that needed no retraction.

        Returns:
            Whether less is asked for now.
        """
        if self.num_tokens == self._min_tokens:
            return False
        self._num_calm_steps += 1
        if self._num_calm_steps < _CALM_STEPS:
            return False
        self._num_calm_steps = 0
        self.num_tokens = max(self._min_tokens, self.num_tokens // 2)
        return True
