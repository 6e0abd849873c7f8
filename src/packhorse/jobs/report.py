"""What a job looks like while it runs, and what it did."""

from __future__ import annotations

import resource
import sys
from array import array
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from packhorse.jobs.forecast import TimeLeft, time_left
from packhorse.jobs.prepare import UnknownField
from packhorse.jobs.serving import Serving, serving
from packhorse.jobs.tally import Tally

if TYPE_CHECKING:
    from packhorse.engine.engine import Engine
    from packhorse.engine.histogram import HistogramSnapshot
    from packhorse.engine.stats import EngineStats

PROGRESS_SECONDS = 0.25

Stage = Literal["reading", "loading", "checking", "running", "sorting"]


@dataclass(frozen=True, slots=True)
class JobProgress:
    """One look at a running job.

    total, done, failed: lines, those of earlier starts included (`kept` of them). prompt_tokens, generated_tokens:
    through the model since this start. running, waiting: sequences. elapsed: seconds since the first request.
    left: None when nothing is known. serving: of this start.
    """

    stage: Stage
    total: int = 0
    done: int = 0
    failed: int = 0
    kept: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    elapsed: float = 0.0
    left: TimeLeft | None = None
    serving: Serving = field(default_factory=Serving)


OnProgress = Callable[[JobProgress], None]


@dataclass(frozen=True, slots=True)
class JobReport:
    """The outcome. Lines and tokens are those of the whole job, over all its starts; the rest is this start's.

    kept: results of earlier starts. stopped_by: the signal, if one ended it. already_complete: nothing had to be done.
    prompt_tokens, completion_tokens: of successful lines. *_per_s: tokens of results finished in this start, over
    elapsed_s (seconds from the first request to the last result, model loading left out). latency_*_s: from submission
    to the last token, waiting included. serving: its fields stand beside the others in JSON. peak_memory_bytes: of
    this process. unknown_fields: name, lines, first_line.
    """

    output: str
    total: int
    ok: int
    failed: int
    kept: int
    prompt_tokens: int
    completion_tokens: int
    elapsed_s: float = 0.0
    prompt_tokens_per_s: float = 0.0
    completion_tokens_per_s: float = 0.0
    latency_p50_s: float | None = None
    latency_p95_s: float | None = None
    serving: Serving = field(default_factory=Serving)
    peak_memory_bytes: int = 0
    stopped_by: int | None = None
    already_complete: bool = False
    unknown_fields: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0: every line succeeded. 1: some failed. 128 + signal number: it was stopped."""
        return 128 + self.stopped_by if self.stopped_by is not None else int(self.failed > 0)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: flat."""
        fields = asdict(self)
        figures: dict[str, Any] = fields.pop("serving")
        return fields | figures | {"exit_code": self.exit_code}


class Watch:
    """Sees a job run: tells its progress now and then, and has the figures for the report."""

    def __init__(self, on_progress: OnProgress, clock: Callable[[], float]) -> None:
        self._on_progress = on_progress
        self._clock = clock
        self._now = JobProgress("reading")
        self._tally: Tally | None = None
        self._told_at = self._started_at = 0.0
        self._first_stats: EngineStats | None = None
        self._first_tokens = (0, 0)
        self._figures: dict[str, Any] = {}
        self._notes: list[str] = []

    def note(self, text: str) -> None:
        """Something that a user should read once, in the report."""
        self._notes.append(text)

    def stage(self, stage: Stage, **more: Any) -> None:
        self._now = replace(self._now, stage=stage, **more)
        self._on_progress(self._now)

    def begin(self, tally: Tally, total: int) -> None:
        """The job is known: so many lines, so many of them done already."""
        self._tally = tally
        self._now = replace(self._now, total=total, done=tally.done, failed=tally.failed, kept=tally.done)

    def start(self, engine: Engine) -> None:
        """The first request is about to be submitted."""
        self._told_at = self._started_at = self._clock()
        self._first_stats = engine.stats()
        if self._tally is not None:
            self._first_tokens = (self._tally.prompt_tokens, self._tally.completion_tokens)
        self.stage("running")

    def tick(self, engine: Engine) -> bool:
        """Tell the progress if it is time to; whether it was."""
        if self._clock() - self._told_at < PROGRESS_SECONDS:
            return False
        self._told_at = self._clock()
        self._tell(engine)
        return True

    def stop(self, engine: Engine, latencies: array[float], unknown_fields: Iterable[UnknownField]) -> None:
        """No more steps, for whatever reason."""
        self._tell(engine)
        now, first, tally = engine.stats(), self._first_stats, self._tally
        assert first is not None
        assert tally is not None
        elapsed = self._clock() - self._started_at
        self._figures = {
            "elapsed_s": elapsed,
            "prompt_tokens_per_s": _rate(tally.prompt_tokens - self._first_tokens[0], elapsed),
            "completion_tokens_per_s": _rate(tally.completion_tokens - self._first_tokens[1], elapsed),
            "latency_p50_s": _percentile(latencies, 50),
            "latency_p95_s": _percentile(latencies, 95),
            "serving": serving(now, first),
            "unknown_fields": tuple(asdict(unknown) for unknown in unknown_fields),
        }

    def report(
        self, output: Path, tally: Tally, *, stopped_by: int | None = None, already_complete: bool = False
    ) -> JobReport:
        return JobReport(
            output=str(output),
            total=self._now.total,
            ok=tally.ok,
            failed=tally.failed,
            kept=self._now.kept,
            prompt_tokens=tally.prompt_tokens,
            completion_tokens=tally.completion_tokens,
            peak_memory_bytes=_peak_memory(),
            stopped_by=stopped_by,
            already_complete=already_complete,
            notes=tuple(self._notes),
            **self._figures,
        )

    def _tell(self, engine: Engine) -> None:
        stats, first, tally = engine.stats(), self._first_stats, self._tally
        assert first is not None
        assert tally is not None
        generated = stats.generated_tokens - first.generated_tokens
        elapsed = self._clock() - self._started_at
        self._now = replace(
            self._now,
            done=tally.done,
            failed=tally.failed,
            # Every generated token but a sequence's last goes through the model once more, as input.
            prompt_tokens=max(0, stats.computed_tokens - first.computed_tokens - generated),
            generated_tokens=generated,
            running=stats.num_running,
            waiting=stats.num_waiting,
            blocks_used=stats.blocks_used,
            blocks_total=stats.blocks_total,
            elapsed=elapsed,
            left=time_left(
                engine.outstanding(),
                unread_lines=max(0, self._now.total - tally.done - engine.num_unfinished),
                finished_lines=tally.done - self._now.kept,
                finished_tokens=tally.completion_tokens - self._first_tokens[1],
                tokens_per_s=_rate(generated, elapsed),
                token_seconds=_mean_between(stats.inter_token_latency, first.inter_token_latency),
            ),
            serving=serving(stats, first),
        )
        self._on_progress(self._now)


def _mean_between(now: HistogramSnapshot, first: HistogramSnapshot) -> float | None:
    count = now.count - first.count
    return (now.total - first.total) / count if count else None


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _percentile(values: array[float], percent: float) -> float | None:
    return float(np.percentile(np.frombuffer(values, dtype=np.float64), percent)) if values else None


def _peak_memory() -> int:
    """Bytes of memory this process held at most."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
