"""Schedule policies with one fault each."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from minisgl.kvcache.contract import PrefixCache
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.contract import Policy, PolicyConfig, ScheduledReq


class BrokenPolicy(Policy):
    """First come, first served."""

    def __init__(self, config: PolicyConfig) -> None:
        del config

    def order(self, waiting: Any, cache: PrefixCache) -> list[ScheduledReq]:  # Any: an iterable
        return list(waiting)


class StarvesTheLast(BrokenPolicy):
    """Never names the youngest request."""

    def order(self, waiting: Any, cache: PrefixCache) -> list[ScheduledReq]:  # Any: an iterable
        return list(waiting)[:-1]


class LeavesALock(BrokenPolicy):
    """Changes the cache that it looks into."""

    def order(self, waiting: Any, cache: PrefixCache) -> list[ScheduledReq]:  # Any: an iterable
        reqs = list(waiting)
        for req in reqs:
            cache.lock(cache.match_prefix(req.token_ids).handle)
        return reqs


class NamesSomebodyTwice(BrokenPolicy):
    """The first is the last as well."""

    def order(self, waiting: Any, cache: PrefixCache) -> list[ScheduledReq]:  # Any: an iterable
        reqs = list(waiting)
        return [*reqs, *reqs[:1]]


class InventsARequest(BrokenPolicy):
    """Names one that does not wait."""

    def order(self, waiting: Any, cache: PrefixCache) -> list[ScheduledReq]:  # Any: an iterable
        stranger = ScheduledReq(-1, np.zeros(1, np.int32), 2, SamplingParams())
        return [*waiting, stranger]


class DrawsLots(BrokenPolicy):
    """Each rank draws its own."""

    def order(self, waiting: Any, cache: PrefixCache) -> list[ScheduledReq]:  # Any: an iterable
        reqs = list(waiting)
        random.shuffle(reqs)
        return reqs


class AgesRequests(BrokenPolicy):
    """Who waits becomes more urgent."""

    def order(self, waiting: Any, cache: PrefixCache) -> list[ScheduledReq]:  # Any: an iterable
        reqs = list(waiting)
        for req in reqs:
            req.priority += 1
        return reqs


class ForgetsPrefixes(BrokenPolicy):
    """Makes room before anybody starts."""

    def order(self, waiting: Any, cache: PrefixCache) -> list[ScheduledReq]:  # Any: an iterable
        cache.evict(cache.sizes().evictable)
        return list(waiting)


class RanksByPriority(BrokenPolicy):
    """Requests of one priority have the same rank."""

    def rank(self, req: ScheduledReq) -> tuple[int, ...]:
        return (-req.priority,)


class RanksByLength(BrokenPolicy):
    """A request that grows is sooner sent back."""

    def rank(self, req: ScheduledReq) -> tuple[int, ...]:
        return (len(req.token_ids), req.arrival)
