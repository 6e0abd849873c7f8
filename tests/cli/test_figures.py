"""Numbers as people read them."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from packhorse.cli.figures import duration, report_lines, report_title, seconds, time_left
from packhorse.cli.progress import PLAIN_SECONDS, PlainDisplay, status_line
from packhorse.jobs.forecast import TimeLeft
from packhorse.jobs.report import JobProgress, JobReport
from packhorse.jobs.serving import Serving
from tests.support.scripted import FakeClock

HALF = JobProgress(
    stage="running",
    total=1500,
    done=800,
    failed=3,
    kept=100,
    prompt_tokens=5000,
    generated_tokens=2000,
    running=32,
    waiting=14,
    blocks_used=41,
    blocks_total=100,
    elapsed=70.0,
    left=TimeLeft(70.0, None),
)
REPORT = JobReport(output="out.jsonl", total=10, ok=7, failed=1, kept=2, prompt_tokens=50, completion_tokens=70)


def test_a_status_line_says_all_at_once() -> None:
    assert status_line(HALF) == (
        "800/1,500 done (3 failed), in 71 tok/s, out 29 tok/s, 32 running, 14 waiting, cache 41%, 1:10 left"
    )


@pytest.mark.parametrize(
    ("left", "text"),
    [
        (TimeLeft(70.0, None), "1:10 left"),
        (TimeLeft(70.0, 80.0), "1:10 left"),
        (TimeLeft(6.0, 330.0), "0:06 to 5:30 left"),
        (TimeLeft(None, 330.0), "at most 5:30 left"),
        (TimeLeft(None, None), None),
        (None, None),
    ],
)
def test_time_left_is_a_range_where_it_is_not_known_better(left: TimeLeft | None, text: str | None) -> None:
    assert time_left(replace(HALF, left=left)) == text
    assert (text is None) == ("left" not in status_line(replace(HALF, left=left)))


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (61, "1:01"), (3723, "1:02:03")])
def test_durations_are_read_like_a_clock(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_without_a_terminal_a_line_comes_every_few_seconds() -> None:
    stream, clock = io.StringIO(), FakeClock()
    display = PlainDisplay(stream, clock)
    for _ in range(100):
        display.on_progress(HALF)
        clock.advance(PLAIN_SECONDS / 10)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "Running …"
    assert len(lines) == 10
    assert "\x1b" not in stream.getvalue()


def test_a_report_leaves_out_what_is_not_known() -> None:
    text = "\n".join(report_lines(REPORT))
    assert "7 ok, 1 failed, of 10 (2 from earlier starts)" in text
    assert "latency" not in text
    assert "None" not in text


@pytest.mark.parametrize(("number", "name"), [(2, "Ctrl-C"), (15, "SIGTERM")])
def test_a_stopped_job_says_how_to_go_on(number: int, name: str) -> None:
    report = JobReport("out", 10, 4, 0, 0, 1, 1, stopped_by=number)
    assert report_title(report) == f"Stopped by {name}: 4 of 10 results are kept. Run the same command again to go on."
    assert report.exit_code == 128 + number


BUSY = Serving(
    mean_batch_size=12.5,
    preemptions=3,
    prefix_hit_rate=0.42,
    queue_p50_s=0.05,
    queue_p95_s=1.5,
    ttft_p50_s=0.25,
    ttft_p95_s=2.0,
    itl_p50_s=0.031,
    itl_p95_s=0.05,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.00025, "0.25 ms"), (0.031, "31 ms"), (0.9994, "999 ms"), (0.9996, "1.00 s"), (2.314, "2.31 s")],
)
def test_latencies_have_the_unit_that_suits_them(value: float, text: str) -> None:
    assert seconds(value) == text


def test_progress_and_summary_show_how_the_engine_serves() -> None:
    line = status_line(replace(HALF, serving=BUSY))
    for words in ("queue 50 ms/1.50 s", "TTFT 250 ms/2.00 s", "ITL 31 ms/50 ms", "prefix hits 42%", "preemptions 3"):
        assert words in line
    text = "\n".join(report_lines(replace(REPORT, serving=BUSY)))
    for words in (
        "first token      p50 250 ms, p95 2.00 s",
        "in the queue     p50 50 ms, p95 1.50 s",
        "next tokens      p50 31 ms, p95 50 ms",
        "12.5 sequences, 3 preemptions",
        "42% of prompt tokens were known",
    ):
        assert words in text


def test_what_says_nothing_is_left_out() -> None:
    quiet = replace(BUSY, preemptions=0, prefix_hit_rate=0.0, queue_p50_s=0.0001, queue_p95_s=0.0002)
    text = "\n".join([status_line(replace(HALF, serving=quiet)), *report_lines(replace(REPORT, serving=quiet))])
    for word in ("queue", "prefix", "preempt"):
        assert word not in text


def test_a_resumed_job_says_what_is_of_this_start_only() -> None:
    resumed = replace(REPORT, elapsed_s=2.0, latency_p50_s=0.1, latency_p95_s=0.2, serving=BUSY)
    lines = report_lines(resumed)
    [place] = [i for i, line in enumerate(lines) if "this start only" in line]
    assert "6 results; rates, latencies and memory below are of these alone" in lines[place]
    whole, own = "\n".join(lines[:place]), "\n".join(lines[place:])
    assert "2 from earlier starts" in whole
    assert "tokens" in whole
    for figure in ("throughput", "latency", "first token", "next tokens", "mean batch", "peak memory"):
        assert figure in own
        assert figure not in whole
    assert "this start" not in "\n".join(report_lines(replace(resumed, kept=0)))
