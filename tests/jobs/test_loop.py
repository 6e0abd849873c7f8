"""The loop keeps few requests in flight, and leaves none behind; the journal is synced about once a second."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from packhorse.engine.engine import Engine
from packhorse.jobs.job import JobModel
from packhorse.jobs.journal import SYNC_SECONDS, open_journal
from packhorse.jobs.report import JobProgress
from tests.jobs.scripted import Bench, StopAfter, prompt, scripted_model
from tests.support.scripted import FakeClock


def watched(**settings: int) -> tuple[JobModel, Engine]:
    """A model and its engine, to look at it afterwards."""
    model = scripted_model(**settings)
    engine, tokenizer = model.load()
    return JobModel(model.name, model.identity, model.names, lambda: (engine, tokenizer)), engine


def test_no_more_requests_are_in_flight_than_the_window(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.write(*[prompt("a", max_tokens=5) for _ in range(100)])
    model, engine = watched(max_num_seqs=4)
    most = 0
    step = engine.step

    def look() -> list:  # type: ignore[type-arg]
        nonlocal most
        most = max(most, engine.num_unfinished)
        return step()

    monkeypatch.setattr(engine, "step", look)
    assert bench.run(lambda: model, window=9).ok == 100
    assert most == 9


def test_prompts_of_a_line_that_failed_do_not_run(bench: Bench) -> None:
    bench.write(prompt(["a", "b", "x" * 5000], max_tokens=1000), prompt("good", max_tokens=2))
    model, engine = watched()
    bench.run(lambda: model)
    assert engine.stats().generated_tokens == 2


def test_a_stopped_job_leaves_nothing_in_the_engine(bench: Bench) -> None:
    bench.write(*[prompt("a", max_tokens=50) for _ in range(50)])
    model, engine = watched(max_num_seqs=4)
    bench.run(lambda: model, signals=StopAfter(20))
    assert (engine.stats().num_running, engine.stats().num_waiting) == (0, 0)
    engine.check_integrity()
    assert bench.run(lambda: model).ok == 50, "the same engine finishes the job"


def test_progress_is_told_a_few_times_a_second_however_fast_lines_fail(bench: Bench) -> None:
    clock = FakeClock()

    def ticking() -> float:
        clock.advance(0.001)
        return clock.now

    told: list[JobProgress] = []
    bench.write(*[b"{" for _ in range(1000)])
    bench.run(clock=ticking, on_progress=told.append)
    running = [progress for progress in told if progress.stage == "running"]
    assert 4 <= len(running) <= 20
    assert [p.done for p in running] == sorted(p.done for p in running)


def test_the_journal_is_synced_once_a_second_and_only_when_it_grew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncs: list[float] = []
    clock = FakeClock()
    monkeypatch.setattr(os, "fsync", lambda _: syncs.append(clock.now))
    journal = open_journal(tmp_path / "out.partial", clock)
    for _ in range(50):
        journal.append(b"{}\n")
        journal.sync_if_due()
        clock.advance(SYNC_SECONDS / 10)
    assert len(syncs) == 4
    clock.advance(SYNC_SECONDS)
    journal.sync_if_due()
    assert len(syncs) == 5
    for _ in range(5):
        clock.advance(SYNC_SECONDS)
        journal.sync_if_due()
    assert len(syncs) == 5, "nothing was written since"
    journal.close()
