"""From settings to a scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from minisgl.config.load import Settings
from minisgl.config.sections import SchedulerSettings
from minisgl.engine.contract import StepEngine
from minisgl.engine.origin import ErrorOrigin
from minisgl.kvcache.contract import CacheConfig, PrefixCache
from minisgl.plugin.manager import PluginManager
from minisgl.plugin.records import StepRecord
from minisgl.plugin.selection import Selection
from minisgl.plugin.spec import ProbeContext
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.contract import Policy, PolicyConfig
from minisgl.scheduler.io import SchedulerIO
from minisgl.scheduler.named_policy import NamedPolicy
from minisgl.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class SchedulerBackends:
    """The picked backends that a scheduler needs; resolved before weights are loaded.

    Attributes:
        cache: The prefix cache.
        policy: The order in which waiting requests start.
    """

    cache: Selection
    policy: Selection

    @classmethod
    def resolve(
        cls, manager: PluginManager, settings: Settings, context: ProbeContext
    ) -> SchedulerBackends:
        """Pick both.

        Args:
            manager: The plugins of this process.
            settings: Say which.
            context: Machine and model, see `describe_to_probes`.

        Raises:
            PluginError: A choice cannot be met; the message starts with its flag.
        """
        return cls(
            cache=manager.resolve("cache", settings.backends.cache, context),
            policy=manager.resolve("policy", settings.backends.policy, context),
        )

    def names(self) -> dict[str, str]:
        """Return what serves each kind."""
        return {"cache": self.cache.one.name, "policy": self.policy.one.name}

    def describe(self) -> list[str]:
        """Say for each kind what was picked and why, one line each."""
        return [self.cache.describe(), self.policy.describe()]


def build_scheduler(
    backends: SchedulerBackends,
    settings: Settings,
    engine: StepEngine,
    io: SchedulerIO,
    on_step: Callable[[StepRecord], None] | None = None,
) -> Scheduler:
    """Build a scheduler with the picked backends.

    Args:
        backends: The picked ones.
        settings: All settings.
        engine: Computes.
        io: The line to the world.
        on_step: Observes steps; ``None`` costs nothing.

    Raises:
        PluginError: The code of one of them cannot be imported, or fails.
    """
    cache_backend, policy_backend = backends.cache.one, backends.policy.one
    cache: PrefixCache = cache_backend.build(
        CacheConfig(engine.limits.page_size, settings.plugin(cache_backend.key)), PrefixCache
    )
    policy_config = PolicyConfig(settings.plugin(policy_backend.key))
    policy: Policy = NamedPolicy(
        policy_backend.build(policy_config, Policy), policy_backend.subject
    )
    config = scheduler_config(settings.scheduler, settings.engine.tp)
    origin = ErrorOrigin((*engine.picked, cache_backend))
    return Scheduler(engine, cache, policy, io, config, on_step, origin)


def scheduler_config(settings: SchedulerSettings, tp_size: int) -> SchedulerConfig:
    """Read the scheduler's section.

    With several ranks a failing step must fail on all of them, so none isolates its requests.
    """
    return SchedulerConfig(
        max_prefill_length=settings.max_prefill_length,
        max_prefill_steps=settings.max_prefill_steps,
        admission=settings.admission,
        is_overlap=settings.overlap,
        max_queued_requests=settings.max_queued_requests,
        is_isolating=tp_size == 1,
    )
