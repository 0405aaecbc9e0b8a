"""From settings to a scheduler."""

from __future__ import annotations

from minisgl.config.load import Settings
from minisgl.config.sections import SchedulerSettings
from minisgl.engine.contract import StepEngine
from minisgl.kvcache.contract import CacheConfig, PrefixCache
from minisgl.plugin.manager import PluginManager
from minisgl.plugin.spec import ProbeContext
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.contract import Policy, PolicyConfig
from minisgl.scheduler.io import SchedulerIO
from minisgl.scheduler.scheduler import Scheduler


def build_scheduler(
    manager: PluginManager, settings: Settings, engine: StepEngine, io: SchedulerIO
) -> Scheduler:
    """Build a scheduler with the cache and the policy that the settings name.

    Raises:
        PluginError: One of them cannot be had.
    """
    context = ProbeContext(page_size=engine.limits.page_size)
    chosen_cache = manager.resolve("cache", settings.backends.cache, context).one
    cache: PrefixCache = chosen_cache.build(
        CacheConfig(engine.limits.page_size, settings.plugin(chosen_cache.key))
    )
    chosen_policy = manager.resolve("policy", settings.backends.policy, context).one
    policy: Policy = chosen_policy.build(PolicyConfig(settings.plugin(chosen_policy.key)))
    config = scheduler_config(settings.scheduler, settings.engine.tp)
    return Scheduler(engine, cache, policy, io, config)


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
