"""How the engine served a job so far: differences of its statistics to those at the start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packhorse.engine.histogram import HistogramSnapshot
    from packhorse.engine.stats import EngineStats


@dataclass(frozen=True, slots=True)
class Serving:
    """Figures of this start; None where nothing was observed yet.

    mean_batch_size: sequences of a step. prefix_hit_rate: part of the tokens to compute that the prefix cache had.
    In seconds: queue_* from submission to the first step; ttft_* from submission to the first token, the queue
    included; itl_* from one token of a sequence to its next.
    """

    mean_batch_size: float | None = None
    preemptions: int = 0
    prefix_hit_rate: float | None = None
    queue_p50_s: float | None = None
    queue_p95_s: float | None = None
    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    itl_p50_s: float | None = None
    itl_p95_s: float | None = None


def serving(now: EngineStats, first: EngineStats) -> Serving:
    """What happened between two snapshots of one engine."""
    steps = now.steps - first.steps
    queries = now.prefix_queries - first.prefix_queries
    queue_p50, queue_p95 = _quantiles(now.queue_time, first.queue_time)
    ttft_p50, ttft_p95 = _quantiles(now.time_to_first_token, first.time_to_first_token)
    itl_p50, itl_p95 = _quantiles(now.inter_token_latency, first.inter_token_latency)
    return Serving(
        mean_batch_size=(now.batched_sequences - first.batched_sequences) / steps if steps else None,
        preemptions=now.preemptions - first.preemptions,
        prefix_hit_rate=(now.prefix_hits - first.prefix_hits) / queries if queries else None,
        queue_p50_s=queue_p50,
        queue_p95_s=queue_p95,
        ttft_p50_s=ttft_p50,
        ttft_p95_s=ttft_p95,
        itl_p50_s=itl_p50,
        itl_p95_s=itl_p95,
    )


def _quantiles(now: HistogramSnapshot, first: HistogramSnapshot) -> tuple[float, float] | tuple[None, None]:
    """p50 and p95 of what was observed in between."""
    counts = tuple(b - a for a, b in zip(first.counts, now.counts, strict=True))
    between = type(now)(now.edges, counts, now.total - first.total)
    return (between.quantile(0.5), between.quantile(0.95)) if between.count else (None, None)
