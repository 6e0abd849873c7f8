"""Processes that are killed, stopped, or run out of disk; in all cases the same command finishes the job."""

from __future__ import annotations

import errno
import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from packhorse.errors import JobError
from tests.jobs.conftest import Driver
from tests.jobs.scripted import Bench, batch, line_of, prompt, scripted_model

LINES = 500
ROUNDS = 200
MANY = 5000
"""Lines of a job that is still at work when a signal comes late, as on a busy machine."""


def fill(bench: Bench, count: int = LINES) -> None:
    """Prompts that finish out of order, some lines bad."""
    lines = [batch(f"标识-{i}", prompt(f"question {i}", max_tokens=(i * 7) % 13 + 1)) for i in range(count)]
    bench.write(*[b'{"prompt": ' if i % 50 == 7 else line for i, line in enumerate(lines)])


def when_written(path: Path, size: int) -> Callable[[], bool]:
    """Whether so many bytes are in the file, or it is gone again."""
    return lambda: _size(path) >= size


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def when_passed(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end


@pytest.mark.slow
def test_two_hundred_kills_lose_double_or_tear_nothing(tmp_path: Path, driver: Driver) -> None:
    """The final file is byte for byte that of a job which nobody killed."""
    bench = Bench(tmp_path)
    fill(bench)
    begin = time.monotonic()
    assert driver.finish(bench) == 1
    seconds = time.monotonic() - begin
    whole = bench.output.read_bytes()
    assert whole.count(b"\n") == LINES
    chance = random.Random(20240)
    kills = resumed = 0
    while kills < ROUNDS:
        for path in (bench.output, bench.files.sidecar):
            path.unlink()
        code = -signal.SIGKILL
        while code == -signal.SIGKILL:
            resumed += _size(bench.files.partial) > 0
            pid = driver.start(bench, engine={"max_num_seqs": 8}, window=16)
            if chance.random() < 0.5:
                due = when_written(bench.files.partial, chance.randrange(len(whole)))
            else:
                due = when_passed(chance.random() * seconds)
            driver.signal_when(due, pid, signal.SIGKILL)
            code = driver.wait()
            kills += code == -signal.SIGKILL
        assert code == 1
        assert bench.output.read_bytes() == whole
        assert not bench.files.partial.exists()
    assert resumed > ROUNDS / 2, "most kills must have come when something was done"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_half_way_keeps_finished_results_and_has_its_exit_code(
    tmp_path: Path, driver: Driver, number: signal.Signals
) -> None:
    bench = Bench(tmp_path)
    fill(bench, MANY)
    pid = driver.start(bench, engine={"max_num_seqs": 4}, window=8)
    driver.signal_when(when_written(bench.files.partial, 60_000), pid, number)
    assert driver.wait() == 128 + number
    kept = bench.results(bench.files.partial)
    assert 60 < len(kept) < MANY
    assert not bench.output.exists()
    assert not bench.files.lock.exists()
    assert driver.finish(bench) == 1
    assert [line_of(record) for record in bench.results()] == list(range(1, MANY + 1))
    before = {record["id"]: record for record in kept}
    assert all(before.get(record["id"], record) == record for record in bench.results())


def test_a_full_disk_keeps_finished_results_and_says_what_to_do(tmp_path: Path, driver: Driver) -> None:
    error = tmp_path / "error"
    bench = Bench(tmp_path)
    fill(bench, 200)
    assert driver.finish(bench) == 1
    whole = bench.output.read_bytes()
    for limit in (10_000, 40_001, len(whole) - 1):
        assert driver.finish(bench, file_limit=limit, restart=limit == 10_000, error=str(error)) == 2
        size = _size(bench.files.partial)
        assert 0 < size <= limit
        assert size == sum(map(len, bench.files.partial.read_bytes().splitlines(keepends=True)))
        assert bench.files.partial.read_bytes().endswith(b"}\n")
        assert "run the same command again" in error.read_text()
    assert driver.finish(bench) == 1
    assert bench.output.read_bytes() == whole


def test_no_room_to_sort_keeps_the_results_and_offers_a_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)
    fill(bench, 50)
    engine = lambda: scripted_model(max_num_seqs=4)  # noqa: E731

    def full(fd: int) -> None:
        if "sorting" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(JobError, match="--no-sort") as caught:
            bench.run(engine)
    assert caught.value.exit_code == 2
    assert not bench.files.sorting.exists()
    report = bench.run(engine, sort=False)
    assert report.kept == report.total == len(bench.results()) == 50


@pytest.mark.parametrize("short", [0, 1, 7])
def test_a_write_cut_short_by_a_full_disk_leaves_no_torn_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: int
) -> None:
    """The kernel may take part of a record before it refuses the rest."""
    bench = Bench(tmp_path)
    fill(bench, 50)
    real, calls = os.write, itertools.count()

    def write(fd: int, data: bytes) -> int:
        call = next(calls)
        if call == 20 and short:
            return real(fd, data[:short])
        if call == 20 + (short > 0):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr("packhorse.jobs.journal.os.write", write)
        with pytest.raises(JobError, match="make room") as caught:
            bench.run()
    assert (caught.value.code, caught.value.exit_code) == ("disk_full", 2)
    assert 15 <= len(bench.results(bench.files.partial)) <= 20
    bench.run()
    assert [line_of(record) for record in bench.results()] == list(range(1, 51))


def test_a_second_start_beside_the_first_is_refused(tmp_path: Path, driver: Driver) -> None:
    bench = Bench(tmp_path)
    fill(bench, MANY)
    pid = driver.start(bench)
    driver.signal_when(when_written(bench.files.partial, 1000), pid, signal.SIGSTOP)
    try:
        with pytest.raises(JobError, match=rf"Another process \({pid}\)"):
            bench.run(restart=True)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert driver.wait() == 1
    assert [line_of(record) for record in bench.results()] == list(range(1, MANY + 1))


def test_memory_does_not_grow_with_the_file(tmp_path: Path, driver: Driver) -> None:
    """Resident memory at 10 % and at 90 % of 50,000 requests."""
    bench = Bench(tmp_path)
    count = 50_000
    bench.write(*[{"prompt": "word", "max_tokens": 1, "custom_id": f"{i}"} for i in range(count)])
    pid = driver.start(bench, engine={"max_num_seqs": 64}, window=128)
    process = psutil.Process(pid)
    record = 360
    held = []
    for share in (0.1, 0.9):
        due = when_written(bench.files.partial, int(count * record * share))
        while process.status() != psutil.STATUS_ZOMBIE and not due():
            pass
        held.append(process.memory_info().rss)
    assert driver.wait() == 0
    assert bench.output.stat().st_size > count * record, "records are smaller than thought: mend the shares"
    early, late = held
    print(f"{early / 2**20:.1f} MiB at 10 %, {late / 2**20:.1f} MiB at 90 %")
    # Eight bytes a line for latencies, and what the allocator keeps.
    assert late - early < 8 << 20
