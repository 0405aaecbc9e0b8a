"""The schedule-policy contract: in which order waiting requests start."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minisgl.core import Req
from minisgl.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pydantic import BaseModel

    from minisgl.kvcache.contract import PrefixCache


class ScheduledReq(Req):
    """A request with what the scheduler remembers about it; only the scheduler changes it.

    A policy reads ``priority``, ``arrival``, ``token_ids`` and ``num_retractions``; the other
    attributes are the scheduler's own books.

    Attributes:
        priority: Larger is more urgent.
        arrival: Number of the request in order of arrival; distinct.
        stop_ids: Token ids that end the request.
        is_finished: Whether its terminal result was made; it may still hold pages.
        num_pages: Pages that its row holds.
        num_cached_pages: Leading ones of them that the prefix cache owns, under the lock of
            ``cache_handle``.
        last_step: Number of the newest launched step that computes it.
        num_retractions: Times it was sent back to the queue.
        num_overtaken: Prefill steps in which a younger request started before it.
    """

    __slots__ = (
        "arrival",
        "is_finished",
        "last_step",
        "num_cached_pages",
        "num_overtaken",
        "num_pages",
        "num_retractions",
        "priority",
        "stop_ids",
    )

    def __init__(
        self, uid: int, prompt_ids: np.ndarray, max_device_len: int, sampling_params: SamplingParams
    ) -> None:
        """Make a request that waits; the scheduler fills in the rest."""
        super().__init__(uid, prompt_ids, max_device_len, sampling_params)
        self.priority = 0
        self.arrival = 0
        self.stop_ids: frozenset[int] = frozenset()
        self.is_finished = False
        self.num_pages = 0
        self.num_cached_pages = 0
        self.last_step = 0
        self.num_retractions = 0
        self.num_overtaken = 0


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """What a policy is built with.

    Attributes:
        settings: The backend's own settings section, or ``None``.
    """

    settings: BaseModel | None = None


class Policy(ABC):
    """Decides who starts first, and who goes back first when memory runs short.

    ``factory(config: PolicyConfig) -> Policy``. Deterministic: under tensor parallelism every rank
    asks its own policy, and all must get the same answer. What it raises ends the engine, with an
    error that names the policy.
    """

    @abstractmethod
    def order(self, waiting: Iterable[ScheduledReq], cache: PrefixCache) -> Iterable[ScheduledReq]:
        """Return waiting requests, the one to start first at the front.

        Called when a request may be able to start. Requests that are left out are not considered
        this time. The scheduler itself sees to it that nobody is overtaken for ever.

        Args:
            waiting: In order of arrival, requests that were retracted first; a live view, which
                does not change while the result is being read.
            cache: For looking up prefixes; not to be changed.
        """

    def rank(self, req: ScheduledReq) -> tuple[int, ...]:
        """Return a key that never changes for ``req`` and is distinct among requests.

        When memory runs short, the running request with the largest one goes back to the queue.
        So the smallest one always gets on, which is why no load can stop all progress.
        """
        return (req.arrival,)
