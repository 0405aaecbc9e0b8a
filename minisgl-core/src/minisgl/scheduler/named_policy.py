"""A schedule policy that says whose it is when it fails."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from minisgl.errors import PluginError
from minisgl.plugin.isolation import describe
from minisgl.scheduler.contract import Policy, ScheduledReq

if TYPE_CHECKING:
    from minisgl.kvcache.contract import PrefixCache


class NamedPolicy(Policy):
    """Asks another policy; what that raises becomes a `PluginError` that names it."""

    def __init__(self, policy: Policy, subject: str) -> None:
        """Ask ``policy``, which messages call ``subject``."""
        self._policy = policy
        self._subject = subject

    def order(self, waiting: Iterable[ScheduledReq], cache: PrefixCache) -> Iterable[ScheduledReq]:
        """Return waiting requests as the policy orders them; see `Policy.order`.

        Raises:
            PluginError: While the result is read: the policy raised, or named no request.
        """
        try:
            ordered = iter(self._policy.order(waiting, cache))
        except PluginError:
            raise
        except Exception as error:
            raise self._failed("order", error) from error
        return _Ordered(self, ordered)

    def rank(self, req: ScheduledReq) -> tuple[int, ...]:
        """Return the policy's key for a request; see `Policy.rank`.

        Raises:
            PluginError: The policy raised.
        """
        try:
            return self._policy.rank(req)
        except PluginError:
            raise
        except Exception as error:
            raise self._failed("rank", error) from error

    def _failed(self, name: str, error: Exception) -> PluginError:
        """Say whose method failed."""
        return PluginError(f"{self._subject}: {name} failed: {describe(error)}")

    def take(self, ordered: Iterator[object]) -> ScheduledReq:
        """Return the next request of an order.

        Raises:
            StopIteration: There is none.
            PluginError: The policy raised, or named no request.
        """
        try:
            req = next(ordered)
        except (StopIteration, PluginError):
            raise
        except Exception as error:
            raise self._failed("order", error) from error
        if not isinstance(req, ScheduledReq):
            raise PluginError(f"{self._subject}: order has {req!r:.80}, no request")
        return req


class _Ordered(Iterator[ScheduledReq]):
    """What a policy gives, one by one.

    No generator: when the scheduler has seen enough, one would be ended by its finaliser, and an
    interrupt that comes in there is lost.
    """

    def __init__(self, policy: NamedPolicy, ordered: Iterator[object]) -> None:
        self._policy = policy
        self._ordered = ordered

    def __next__(self) -> ScheduledReq:
        return self._policy.take(self._ordered)
