"""What a person sees while a job runs: a live panel in a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

from packhorse.cli.figures import (
    cache_share,
    count,
    rate,
    report_lines,
    serving_figures,
    stage_name,
    time_left,
)
from packhorse.jobs.report import JobProgress, JobReport

PLAIN_SECONDS = 5.0


class Display(Protocol):
    """Shows a job; all of it on standard error, so that standard output stays free."""

    def on_progress(self, progress: JobProgress) -> None: ...

    def on_conversion(self, stage: str, fraction: float) -> None: ...

    def show_report(self, report: JobReport) -> None: ...


@contextmanager
def progress_display(stream: TextIO | None = None) -> Iterator[Display]:
    """The display that suits the stream (default: standard error); what it draws live is gone afterwards."""
    stream = stream or sys.stderr
    if not stream.isatty():
        yield PlainDisplay(stream)
        return
    from packhorse.cli.live import LiveDisplay

    with LiveDisplay(stream) as display:
        yield display


class PlainDisplay:
    """Whole lines, at most one in PLAIN_SECONDS and one for each stage."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._stage = ""
        self._said_at = 0.0

    def on_progress(self, progress: JobProgress) -> None:
        if progress.stage != self._stage:
            self._stage = progress.stage
            self._say(f"{stage_name(progress.stage)} …")
        elif progress.stage == "running" and self._clock() - self._said_at >= PLAIN_SECONDS:
            self._say(status_line(progress))

    def on_conversion(self, stage: str, fraction: float) -> None:  # noqa: ARG002 - a line a stage is enough
        if stage != self._stage:
            self._stage = stage
            self._say(f"Converting the model: {stage} …")

    def show_report(self, report: JobReport) -> None:
        for line in report_lines(report):
            self._say(line)

    def _say(self, text: str) -> None:
        self._said_at = self._clock()
        print(text, file=self._stream, flush=True)


def status_line(progress: JobProgress) -> str:
    """`128/500 done (2 failed), in 310 tok/s, out 96 tok/s, 32 running, 14 waiting, cache 41%, …, 1:20 left`"""
    failed = f" ({progress.failed} failed)" if progress.failed else ""
    parts = [
        f"{count(progress.done)}/{count(progress.total)} done{failed}",
        f"in {rate(progress.prompt_tokens, progress.elapsed)} tok/s",
        f"out {rate(progress.generated_tokens, progress.elapsed)} tok/s",
        f"{progress.running} running",
        f"{progress.waiting} waiting",
        f"cache {cache_share(progress):.0%}",
        *(f"{name} {value}" for name, value in serving_figures(progress.serving)),
    ]
    left = time_left(progress)
    return ", ".join([*parts, left] if left is not None else parts)
