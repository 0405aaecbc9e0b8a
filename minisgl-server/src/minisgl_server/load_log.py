"""A line about the load every few seconds, while there is one."""

from __future__ import annotations

import asyncio
import logging
import time

from minisgl.errors import CapacityError
from minisgl_server.engine_client import EngineClient
from minisgl_server.metrics import Metrics, kv_usage

logger = logging.getLogger(__name__)


async def log_load(client: EngineClient, metrics: Metrics, interval_s: float) -> None:
    """Log until cancelled.

    Args:
        client: Asked for the scheduler's numbers.
        metrics: Told them, and read for rates.
        interval_s: Seconds between lines; above 0.
    """
    last_s, generated, prompted = time.monotonic(), 0, 0
    cached = computed = 0
    while True:
        await asyncio.sleep(interval_s)
        now_s = time.monotonic()
        is_busy = client.num_open > 0 or metrics.num_generated_tokens > generated
        if is_busy:
            try:
                stats = await client.stats()
            except CapacityError:
                return
            metrics.on_stats(stats)
            seconds = now_s - last_s
            new_cached = stats.num_cached_tokens - cached
            new_computed = stats.num_prefill_tokens - computed
            cached, computed = stats.num_cached_tokens, stats.num_prefill_tokens
            hits = new_cached / (new_cached + new_computed) if new_cached + new_computed else 0.0
            fields = {
                "running": stats.num_running,
                "waiting": stats.num_waiting,
                "kv_usage": round(kv_usage(stats), 4),
                "prompt_tokens_per_s": round((metrics.num_prompt_tokens - prompted) / seconds, 1),
                "output_tokens_per_s": round(
                    (metrics.num_generated_tokens - generated) / seconds, 1
                ),
                "prefix_hit_rate": round(hits, 4),
                "preemptions": stats.num_retractions,
            }
            logger.info(
                "%d running, %d waiting, KV cache %.1f %% used, %.1f prompt and %.1f output "
                "tokens/s, %.0f %% of prompts cached",
                fields["running"],
                fields["waiting"],
                100 * fields["kv_usage"],
                fields["prompt_tokens_per_s"],
                fields["output_tokens_per_s"],
                100 * hits,
                extra=fields,
            )
        last_s, generated = now_s, metrics.num_generated_tokens
        prompted = metrics.num_prompt_tokens
