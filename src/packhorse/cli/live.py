"""The live panel of a terminal."""

from __future__ import annotations

from types import TracebackType
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from packhorse.cli.figures import (
    cache_share,
    count,
    rate,
    report_rows,
    report_title,
    serving_figures,
    stage_name,
    time_left,
)
from packhorse.jobs.report import JobProgress, JobReport


class LiveDisplay:
    """Drawn by rich on `stream`; entered while the job runs."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream)
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def on_progress(self, progress: JobProgress) -> None:
        self._live.update(_panel(progress) if progress.stage == "running" else Text(f"{stage_name(progress.stage)} …"))

    def on_conversion(self, stage: str, fraction: float) -> None:
        self._live.update(_bar(f"Converting the model: {stage}", fraction))

    def show_report(self, report: JobReport) -> None:
        self._console.print(report_title(report), style="bold", highlight=False)
        table = Table(show_header=False, box=None, padding=(0, 2))
        for name, value in report_rows(report):
            table.add_row(Text(name, style="dim"), Text(value))
        self._console.print(table)
        for note in report.notes:
            self._console.print(f"note: {note}", highlight=False, markup=False)


def _panel(progress: JobProgress) -> RenderableType:
    share = progress.done / progress.total if progress.total else 0.0
    left = time_left(progress)
    failed = f", {count(progress.failed)} failed" if progress.failed else ""
    figures = Table(show_header=False, box=None, padding=(0, 2))
    figures.add_row("in", f"{rate(progress.prompt_tokens, progress.elapsed)} tok/s", "running", str(progress.running))
    figures.add_row(
        "out", f"{rate(progress.generated_tokens, progress.elapsed)} tok/s", "waiting", str(progress.waiting)
    )
    figures.add_row(
        "left",
        left.removesuffix(" left") if left is not None else "…",
        "cache",
        f"{cache_share(progress):.0%} of its blocks",
    )
    more = iter(serving_figures(progress.serving))
    for name, value in more:
        figures.add_row(name, value, *next(more, ("", "")))
    return Group(_bar(f"{count(progress.done)}/{count(progress.total)} done{failed}", share), figures)


def _bar(text: str, share: float) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_row(ProgressBar(total=1.0, completed=min(1.0, share), width=40), Text(text))
    return grid
