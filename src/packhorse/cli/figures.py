"""Numbers and reports as people read them."""

from __future__ import annotations

from packhorse.jobs.report import JobProgress, JobReport
from packhorse.jobs.serving import Serving

QUEUED_SECONDS = 0.01
"""Nobody wants to read of shorter waits in the queue."""

_STAGES = {
    "reading": "Reading the input",
    "loading": "Loading the model",
    "checking": "Checking every line",
    "running": "Running",
    "sorting": "Putting results in order",
}

_SIGNALS = {2: "Ctrl-C", 15: "SIGTERM"}


def count(value: int) -> str:
    return f"{value:,}"


def rate(amount: float, seconds: float) -> str:
    return f"{amount / seconds:,.0f}" if seconds > 0 else "0"


def duration(seconds: float) -> str:
    """`0:42`, `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def report_title(report: JobReport) -> str:
    """One sentence: what became of the job, and what to do if it is not done."""
    if report.already_complete:
        again = "; run the failed lines again with --retry-errors" if report.failed else ""
        return f"Nothing to do: {report.output} is complete{again}. To make it anew, give --restart."
    if report.stopped_by is not None:
        how = _SIGNALS.get(report.stopped_by, f"signal {report.stopped_by}")
        done = f"{count(report.ok + report.failed)} of {count(report.total)}"
        return f"Stopped by {how}: {done} results are kept. Run the same command again to go on."
    return f"Done: {report.output}"


def seconds(value: float) -> str:
    """`31 ms`, `2.31 s`."""
    return f"{value:,.2f} s" if value >= 0.9995 else f"{value * 1e3:.3g} ms"


def spread(p50: float, p95: float) -> str:
    return f"p50 {seconds(p50)}, p95 {seconds(p95)}"


def report_rows(report: JobReport) -> list[tuple[str, str]]:
    """Name and value of each figure that is known: of the whole job, then of this start."""
    kept = f" ({count(report.kept)} from earlier starts)" if report.kept and not report.already_complete else ""
    rows = [
        ("requests", f"{count(report.ok)} ok, {count(report.failed)} failed, of {count(report.total)}{kept}"),
        ("tokens", f"{count(report.prompt_tokens)} in, {count(report.completion_tokens)} out"),
    ]
    if kept and report.elapsed_s:
        results = count(report.ok + report.failed - report.kept)
        rows.append(("this start only", f"{results} results; rates, latencies and memory below are of these alone"))
    rows += _rates(report)
    rows += _serving_rows(report.serving)
    rows.append(("peak memory", f"{report.peak_memory_bytes / 2**20:,.0f} MiB"))
    for field in report.unknown_fields:
        lines = "1 line" if field["lines"] == 1 else f"{count(field['lines'])} lines"
        rows.append(("ignored field", f"{field['name']} on {lines}, first line {field['first_line']}"))
    return rows


def _rates(report: JobReport) -> list[tuple[str, str]]:
    rows = []
    if report.elapsed_s:
        in_rate, out_rate = report.prompt_tokens_per_s, report.completion_tokens_per_s
        rows.append(("throughput", f"{in_rate:,.1f} tok/s in, {out_rate:,.1f} tok/s out, {report.elapsed_s:,.1f} s"))
    if report.latency_p50_s is not None and report.latency_p95_s is not None:
        rows.append(("latency", spread(report.latency_p50_s, report.latency_p95_s)))
    return rows


def _serving_rows(figures: Serving) -> list[tuple[str, str]]:
    rows = []
    if figures.ttft_p50_s is not None and figures.ttft_p95_s is not None:
        rows.append(("first token", spread(figures.ttft_p50_s, figures.ttft_p95_s)))
    if figures.queue_p95_s is not None and figures.queue_p50_s is not None and figures.queue_p95_s >= QUEUED_SECONDS:
        rows.append(("in the queue", f"{spread(figures.queue_p50_s, figures.queue_p95_s)}, part of the first token's"))
    if figures.itl_p50_s is not None and figures.itl_p95_s is not None:
        rows.append(("next tokens", spread(figures.itl_p50_s, figures.itl_p95_s)))
    if figures.mean_batch_size is not None:
        preempted = f", {count(figures.preemptions)} preemptions" if figures.preemptions else ""
        rows.append(("mean batch", f"{figures.mean_batch_size:.1f} sequences{preempted}"))
    if figures.prefix_hit_rate:
        rows.append(("prefix cache", f"{figures.prefix_hit_rate:.0%} of prompt tokens were known"))
    return rows


def report_lines(report: JobReport) -> list[str]:
    """The report as plain lines."""
    rows = [f"  {name:<17}{value}" for name, value in report_rows(report)]
    return [report_title(report), *rows, *(f"  note: {note}" for note in report.notes)]


def serving_figures(figures: Serving) -> list[tuple[str, str]]:
    """What there is to say so far: short names and values, p50 and p95 of latencies."""
    found = []
    for name, p50, p95 in (
        ("queue", figures.queue_p50_s, figures.queue_p95_s),
        ("TTFT", figures.ttft_p50_s, figures.ttft_p95_s),
        ("ITL", figures.itl_p50_s, figures.itl_p95_s),
    ):
        if p50 is not None and p95 is not None and (name != "queue" or p95 >= QUEUED_SECONDS):
            found.append((name, f"{seconds(p50)}/{seconds(p95)}"))
    if figures.prefix_hit_rate:
        found.append(("prefix hits", f"{figures.prefix_hit_rate:.0%}"))
    if figures.preemptions:
        found.append(("preemptions", count(figures.preemptions)))
    return found


def cache_share(progress: JobProgress) -> float:
    return progress.blocks_used / progress.blocks_total if progress.blocks_total else 0.0


def time_left(progress: JobProgress) -> str | None:
    """`1:10 left`, `0:06 to 5:30 left`, `at most 5:30 left`; None when nothing is known."""
    left = progress.left
    if left is None:
        return None
    if left.likely is None:
        return f"at most {duration(left.most)} left" if left.most is not None else None
    if left.most is None or left.most < 1.5 * left.likely + 1:
        return f"{duration(left.likely)} left"
    return f"{duration(left.likely)} to {duration(left.most)} left"


def stage_name(stage: str) -> str:
    return _STAGES[stage]
