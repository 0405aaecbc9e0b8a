"""Prometheus metrics: vLLM's names under ``minisgl:``."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from minisgl.message.text import FinishedText
from minisgl.message.types import SchedulerStats

_LATENCY_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
_INTER_TOKEN_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 10.0,
)  # fmt: skip
_LENGTH_BUCKETS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)
_REASONS = ("stop", "length", "abort", "error")


class Metrics:
    """All metrics of one server, in a registry of their own."""

    def __init__(self) -> None:
        """Start at zero."""
        self._registry = CollectorRegistry()
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self._num_retractions = 0
        self._make_counters()
        self._make_gauges()
        self._make_histograms()

    def set_model(self, name: str) -> None:
        """Label everything with the served model's name; once, before anything is counted."""
        self._info.labels(model_name=name).set(1)

    def on_token(self, seconds: float, is_first: bool) -> None:
        """Count a token, ``seconds`` after the one before, or after its request came."""
        self.num_generated_tokens += 1
        (self._first_token if is_first else self._inter_token).observe(seconds)

    def on_end(self, finished: FinishedText, seconds: float) -> None:
        """Count the end of a sequence, ``seconds`` after it came."""
        self._finished[finished.reason].inc()
        if finished.refusal or not finished.num_prompt_tokens:
            return
        self.num_prompt_tokens += finished.num_prompt_tokens
        self._prompt_tokens.inc(finished.num_prompt_tokens)
        self._generation_tokens.inc(finished.num_output_tokens)
        self._prefix_queries.inc(finished.num_prompt_tokens)
        self._prefix_hits.inc(finished.num_cached_tokens)
        self._latency.observe(seconds)
        self._prompt_length.observe(finished.num_prompt_tokens)
        self._output_length.observe(finished.num_output_tokens)

    def on_stats(self, stats: SchedulerStats) -> None:
        """Take the scheduler's own numbers."""
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._kv_usage.set(kv_usage(stats))
        missing = stats.num_retractions - self._num_retractions
        if missing > 0:
            self._preemptions.inc(missing)
            self._num_retractions = stats.num_retractions

    def render(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def _make_gauges(self) -> None:
        self._info = Gauge(
            "minisgl:model_info", "The model.", ["model_name"], registry=self._registry
        )
        self._running = Gauge(
            "minisgl:num_requests_running", "Sequences that run.", registry=self._registry
        )
        self._waiting = Gauge(
            "minisgl:num_requests_waiting", "Sequences that wait to run.", registry=self._registry
        )
        self._kv_usage = Gauge(
            "minisgl:kv_cache_usage_perc",
            "Share of KV pages in use, 0 to 1.",
            registry=self._registry,
        )

    def _make_counters(self) -> None:
        home = self._registry
        self._preemptions: Counter = Counter(
            "minisgl:num_preemptions",
            "Running sequences that went back to the queue.",
            registry=home,
        )
        self._prompt_tokens = Counter("minisgl:prompt_tokens", "Prompt tokens.", registry=home)
        self._generation_tokens = Counter(
            "minisgl:generation_tokens", "Output tokens.", registry=home
        )
        self._prefix_queries = Counter(
            "minisgl:prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache.",
            registry=home,
        )
        self._prefix_hits = Counter(
            "minisgl:prefix_cache_hits", "Prompt tokens found in the prefix cache.", registry=home
        )
        finished = Counter(
            "minisgl:request_success",
            "Sequences by how they ended.",
            ["finished_reason"],
            registry=home,
        )
        self._finished = {r: finished.labels(finished_reason=r) for r in _REASONS}

    def _make_histograms(self) -> None:
        home = self._registry
        self._first_token = Histogram(
            "minisgl:time_to_first_token_seconds",
            "Seconds from arrival to the first token.",
            buckets=_LATENCY_BUCKETS_S,
            registry=home,
        )
        self._inter_token = Histogram(
            "minisgl:inter_token_latency_seconds",
            "Seconds between tokens of a sequence.",
            buckets=_INTER_TOKEN_BUCKETS_S,
            registry=home,
        )
        self._latency = Histogram(
            "minisgl:e2e_request_latency_seconds",
            "Seconds from arrival to the end.",
            buckets=_LATENCY_BUCKETS_S,
            registry=home,
        )
        self._prompt_length = Histogram(
            "minisgl:request_prompt_tokens",
            "Tokens of a prompt.",
            buckets=_LENGTH_BUCKETS,
            registry=home,
        )
        self._output_length = Histogram(
            "minisgl:request_generation_tokens",
            "Tokens of an output.",
            buckets=_LENGTH_BUCKETS,
            registry=home,
        )


def kv_usage(stats: SchedulerStats) -> float:
    """Return the share of pages that requests hold; cached pages that can be evicted are free."""
    free = stats.num_free_pages + stats.num_evictable_pages
    return 1.0 - free / stats.num_pages if stats.num_pages else 0.0
