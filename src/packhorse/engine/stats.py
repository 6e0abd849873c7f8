"""What the engine is doing and has done: one typed snapshot for the progress display, the server and benchmarks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from packhorse.engine.histogram import COUNTS, TOKENS, Histogram, HistogramSnapshot
from packhorse.runner.base import Int32


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts now (num_*, blocks_*, waiting_tokens, concurrency_limit); the rest since the engine was made or reset.

    waiting_tokens: of sequences that wait. blocks_used: owned by sequences; blocks_cached: nobody's, but of a known
    prefix; the others are empty. prompt_tokens: of requests taken in. computed_tokens: through the model,
    recomputation included. generated_tokens: sampled for someone; aborted_tokens: of those, for requests that were
    aborted or failed. prefix_queries, prefix_hits: tokens looked up in the prefix cache, and found. batched_sequences:
    summed over steps. finished: requests by reason (stop, length, abort, error).

    Histograms in seconds: queue_time (arrival to first run), time_to_first_token (from arrival), inter_token_latency,
    request_latency (arrival to end). batch_size: sequences of a step. step_tokens: tokens of a step. request_prompt,
    request_generated: tokens of finished requests.
    """

    num_running: int
    num_waiting: int
    waiting_tokens: int
    concurrency_limit: int
    blocks_used: int
    blocks_cached: int
    blocks_total: int
    prompt_tokens: int
    computed_tokens: int
    generated_tokens: int
    aborted_tokens: int
    prefix_queries: int
    prefix_hits: int
    steps: int
    batched_sequences: int
    preemptions: int
    finished: Mapping[str, int]
    queue_time: HistogramSnapshot
    time_to_first_token: HistogramSnapshot
    inter_token_latency: HistogramSnapshot
    request_latency: HistogramSnapshot
    batch_size: HistogramSnapshot
    step_tokens: HistogramSnapshot
    request_prompt: HistogramSnapshot
    request_generated: HistogramSnapshot

    @property
    def mean_batch_size(self) -> float:
        """Sequences in a step, on average; 0 before the first."""
        return self.batched_sequences / self.steps if self.steps else 0.0

    @property
    def failed_requests(self) -> int:
        return self.finished.get("error", 0)


@dataclass(frozen=True, slots=True)
class Outstanding:
    """Sequences that have not ended. generated: int32[S], tokens so far. most_left: int32[S], that may follow."""

    generated: Int32
    most_left: Int32


@dataclass(slots=True)
class EngineCounters:
    """What the engine counts as it goes; `Engine.stats` makes the snapshot."""

    prompt_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    aborted_tokens: int = 0
    steps: int = 0
    batched_sequences: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    queue_time: Histogram = field(default_factory=Histogram)
    time_to_first_token: Histogram = field(default_factory=Histogram)
    inter_token_latency: Histogram = field(default_factory=Histogram)
    request_latency: Histogram = field(default_factory=Histogram)
    batch_size: Histogram = field(default_factory=lambda: Histogram(COUNTS))
    step_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    request_prompt: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    request_generated: Histogram = field(default_factory=lambda: Histogram(TOKENS))
