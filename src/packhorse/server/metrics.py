"""Prometheus metrics: the engine's own counts as they are when somebody asks, and what only the server knows.

Names end as vLLM's do, so that its users' dashboards carry over with another prefix.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from packhorse.engine.histogram import HistogramSnapshot
from packhorse.engine.stats import EngineStats
from packhorse.server.record import Record
from packhorse.server.service import Service

PREFIX = "packhorse:"
LABELS = ("model_name",)
FINISH_REASONS = ("stop", "length", "abort", "error")
REJECTIONS = ("queue_full", "draining", "not_ready", "invalid_request", "invalid_api_key", "body_too_large")
LAG_EVERY = 0.25
"""Seconds between two looks at how late the event loop is."""


class Metrics:
    """What /metrics shows. `render` gives it in the form that the scraper asks for."""

    def __init__(self, service: Service) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(service))
        ProcessCollector(registry=self._registry)
        self._requests = Counter(
            "packhorse:http_requests",
            "HTTP requests that are over, by outcome: ok, refused, failed, left.",
            ("outcome",),
            registry=self._registry,
        )
        self._rejections = Counter(
            "packhorse:requests_rejected",
            "Requests for text that were not taken in, by reason.",
            ("reason",),
            registry=self._registry,
        )
        self._lag = Histogram(
            "packhorse:event_loop_lag_seconds",
            "How late the event loop runs what is due.",
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10),
            registry=self._registry,
        )
        for outcome in ("ok", "refused", "failed", "left"):
            self._requests.labels(outcome)
        for reason in REJECTIONS:
            self._rejections.labels(reason)

    def request_over(self, record: Record) -> None:
        self._requests.labels(record.outcome).inc()
        reason = _rejection(record)
        if reason is not None:
            self._rejections.labels(reason).inc()

    async def watch_lag(self) -> None:
        """Until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_EVERY
            await asyncio.sleep(LAG_EVERY)
            self._lag.observe(max(0.0, loop.time() - due))

    def render(self, accept: str) -> tuple[bytes, str]:
        """The text and its content type."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self._registry), content_type


def _rejection(record: Record) -> str | None:
    """Why a request for text was not taken in; None for one that was."""
    error = record.error
    if error is None or record.taken_in or record.outcome != "refused" or not record.path.startswith("/v1/"):
        return None
    return error.code if error.code in REJECTIONS else "invalid_request"


class _EngineCollector(Collector):
    """Asks the engine at each scrape; nothing of it is counted twice."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def describe(self) -> Iterator[Metric]:
        return iter(())  # nothing is known before the model is loaded

    def collect(self) -> Iterator[Metric]:
        model = self._service.model
        return iter(()) if model is None else engine_metrics(model.engine.stats(), model.name)


def engine_metrics(stats: EngineStats, model: str) -> Iterator[Metric]:
    """One family after the other, all of them at any load."""
    gauges = {
        "num_requests_running": ("Sequences that run.", stats.num_running),
        "num_requests_waiting": ("Sequences that wait.", stats.num_waiting),
        "num_tokens_waiting": ("Tokens of sequences that wait.", stats.waiting_tokens),
        "kv_cache_usage_perc": ("Share of cache blocks in use, 0 to 1.", stats.blocks_used / stats.blocks_total),
    }
    counters = {
        "prefix_cache_queries": ("Tokens looked up in the prefix cache.", stats.prefix_queries),
        "prefix_cache_hits": ("Of those, tokens found.", stats.prefix_hits),
        "num_preemptions": ("Sequences sent back to wait because memory was short.", stats.preemptions),
        "prompt_tokens": ("Prompt tokens of requests taken in.", stats.prompt_tokens),
        "generation_tokens": ("Tokens generated.", stats.generated_tokens),
        "aborted_tokens": ("Of those, for requests that were aborted or failed.", stats.aborted_tokens),
        "computed_tokens": ("Tokens through the model, recomputation included.", stats.computed_tokens),
    }
    histograms = {
        "time_to_first_token_seconds": ("From arrival to the first token.", stats.time_to_first_token),
        "inter_token_latency_seconds": ("From one token of a sequence to the next.", stats.inter_token_latency),
        "e2e_request_latency_seconds": ("From arrival to the end.", stats.request_latency),
        "request_queue_time_seconds": ("From arrival to the first step.", stats.queue_time),
        "request_prompt_tokens": ("Prompt tokens of finished requests.", stats.request_prompt),
        "request_generation_tokens": ("Generated tokens of finished requests.", stats.request_generated),
        "iteration_tokens_total": ("Tokens of a step.", stats.step_tokens),
        "iteration_sequences": ("Sequences of a step.", stats.batch_size),
    }
    for name, (text, value) in gauges.items():
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=LABELS)
        gauge.add_metric([model], value)
        yield gauge
    for name, (text, value) in counters.items():
        counter = CounterMetricFamily(PREFIX + name, text, labels=LABELS)
        counter.add_metric([model], value)
        yield counter
    finished = CounterMetricFamily(
        PREFIX + "request_success", "Requests that ended, by reason.", labels=(*LABELS, "finished_reason")
    )
    for reason in FINISH_REASONS:
        finished.add_metric([model, reason], stats.finished.get(reason, 0))
    yield finished
    for name, (text, snapshot) in histograms.items():
        histogram = HistogramMetricFamily(PREFIX + name, text, labels=LABELS)
        histogram.add_metric([model], _buckets(snapshot), snapshot.total)
        yield histogram


def _buckets(snapshot: HistogramSnapshot) -> list[tuple[str, float]]:
    """Cumulative counts by upper edge, as Prometheus wants them."""
    below, found = 0, []
    for edge, count in zip((*map(repr, snapshot.edges), "+Inf"), snapshot.counts, strict=True):
        below += count
        found.append((edge, float(below)))
    return found
