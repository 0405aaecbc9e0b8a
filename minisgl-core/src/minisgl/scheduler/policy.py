"""The schedule policies of the core."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING

from minisgl.scheduler.contract import Policy, PolicyConfig, ScheduledReq

if TYPE_CHECKING:
    from minisgl.kvcache.contract import PrefixCache

_LPM_WINDOW = 128  # a lookup each, so only so many per step


class FcfsPolicy(Policy):
    """First come, first served."""

    def __init__(self, config: PolicyConfig) -> None:
        """Make the policy; it has no settings."""
        del config

    def order(self, waiting: Iterable[ScheduledReq], cache: PrefixCache) -> Iterable[ScheduledReq]:
        """Keep the order of arrival."""
        del cache
        return waiting


class LpmPolicy(Policy):
    """Longest cached prefix first, among the requests at the front of the queue.

    Source: cache-aware scheduling, arXiv:2312.07104 section 3.
    """

    def __init__(self, config: PolicyConfig) -> None:
        """Make the policy; it has no settings."""
        del config

    def order(self, waiting: Iterable[ScheduledReq], cache: PrefixCache) -> Iterable[ScheduledReq]:
        """Sort by the length of the known prefix; ties keep the order of arrival."""
        window = islice(waiting, _LPM_WINDOW)
        keyed = [(-cache.match_prefix(req.token_ids).handle.cached_len, req) for req in window]
        keyed.sort(key=lambda pair: pair[0])
        return [req for _, req in keyed]


class PriorityPolicy(Policy):
    """Highest priority first, in order of arrival among equals."""

    def __init__(self, config: PolicyConfig) -> None:
        """Make the policy; it has no settings."""
        del config

    def order(self, waiting: Iterable[ScheduledReq], cache: PrefixCache) -> Iterable[ScheduledReq]:
        """Sort by priority; the sort is stable."""
        del cache
        return sorted(waiting, key=lambda req: -req.priority)

    def rank(self, req: ScheduledReq) -> tuple[int, ...]:
        """Retract the least urgent first, the youngest among equals."""
        return (-req.priority, req.arrival)
