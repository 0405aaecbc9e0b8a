"""What a scheduler can be told, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from minisgl.errors import SettingsError


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How to schedule.

    Attributes:
        max_prefill_length: Prompt tokens of one step; longer prompts run in chunks.
        max_prefill_steps: Prefill steps in a row while a decode could run.
        admission: ``"optimistic"`` starts a request when its prompt and a little more fits, and
            retracts when that was too daring; ``"reserve"`` starts it when its whole length fits.
        is_overlap: Prepare a step while the engine runs the one before.
        max_queued_requests: Requests that may wait, or ``None`` for no limit.
        max_overtakes: Prefill steps in which a younger request may start before an older one, per
            older request; then nobody starts before it does.
        min_shared_tokens: A request waits for another that is computing its prefix when that
            saves at least this many tokens.
        headroom_tokens: Tokens that optimistic admission leaves room for, per running request; it
            leaves more while requests have to be retracted.
        is_isolating: Whether a request whose step fails is failed alone and the others go on.
            False where ranks must not part ways: then the failure is raised.
        is_checked_every_step: Check the integrity of all books after every step, for tests.
    """

    max_prefill_length: int = 8192
    max_prefill_steps: int = 4
    admission: Literal["optimistic", "reserve"] = "optimistic"
    is_overlap: bool = True
    max_queued_requests: int | None = None
    max_overtakes: int = 64
    min_shared_tokens: int = 16
    headroom_tokens: int = 64
    is_isolating: bool = True
    is_checked_every_step: bool = False

    def max_open_reqs(self, max_running_reqs: int) -> int | None:
        """Return how many requests may be without a result, running or waiting; no limit: `None`.

        Whoever finds a free row does not wait for long, so only those beyond the rows are limited.
        """
        if self.max_queued_requests is None:
            return None
        return max_running_reqs + self.max_queued_requests

    def __post_init__(self) -> None:
        """Refuse values out of range.

        Raises:
            SettingsError: A field is too small or unknown; the message names it.
        """
        for name, low in (
            ("max_prefill_length", 1),
            ("max_prefill_steps", 1),
            ("max_overtakes", 0),
            ("min_shared_tokens", 1),
            ("headroom_tokens", 0),
        ):
            value = getattr(self, name)
            if value < low:
                raise SettingsError(f"{name} {value}: must be at least {low}")
        if self.max_queued_requests is not None and self.max_queued_requests < 1:
            raise SettingsError(
                f"max_queued_requests {self.max_queued_requests}: must be at least 1, or none"
            )
        if self.admission not in ("optimistic", "reserve"):
            raise SettingsError(f"admission {self.admission!r}: must be optimistic or reserve")
