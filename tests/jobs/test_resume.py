"""The same command again finishes the job: no line lost, doubled or torn."""

from __future__ import annotations

import fcntl
import io
import os
import signal
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packhorse.errors import JobError
from packhorse.jobs import finish as finishing
from packhorse.jobs.signals import StopSignals
from tests.jobs.scripted import Bench, StopAfter, byte_tokenizer, line_of, never, prompt, scripted_model, spoken

QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def ask(bench: Bench, count: int = 20) -> None:
    """Lines that finish out of order; every fifth is bad."""
    lines: list[Any] = [prompt(f"id-{i} ü", custom_id=f"id-{i}", max_tokens=(i * 7) % 11 + 1) for i in range(count)]
    lines[4::5] = [b'{"prompt": ' for _ in lines[4::5]]
    bench.write(*lines)


def stopped(bench: Bench, looks: int = 12, **options: Any) -> int:
    """Run until so many looks for a signal; how many results there are."""
    report = bench.run(lambda: scripted_model(max_num_seqs=4), signals=StopAfter(looks), window=8, **options)
    assert report.exit_code == 143
    partial = bench.files.partial
    return len(bench.results(partial)) if partial.exists() and partial.stat().st_size else 0


def check_whole(bench: Bench, count: int = 20) -> None:
    results = bench.results()
    assert [line_of(record) for record in results] == list(range(1, count + 1))
    for i, record in enumerate(results):
        if i % 5 == 4:
            assert record["error"]["code"] == "invalid_json"
        else:
            assert record["custom_id"] == f"id-{i}"
            assert record["response"]["body"]["usage"]["completion_tokens"] == (i * 7) % 11 + 1
    assert not bench.files.partial.exists()
    assert not bench.files.lock.exists()


def test_a_stopped_job_keeps_what_is_finished_and_goes_on(bench: Bench) -> None:
    ask(bench)
    kept = stopped(bench)
    assert 0 < kept < 20
    assert not bench.output.exists()
    report = bench.run()
    check_whole(bench)
    assert (report.kept, report.ok, report.failed, report.exit_code) == (kept, 16, 4, 1)
    assert report.completion_tokens == sum(
        r["response"]["body"]["usage"]["completion_tokens"] for r in bench.results() if not r["error"]
    )


def test_a_finished_job_has_nothing_to_do_and_says_so(bench: Bench) -> None:
    ask(bench)
    bench.run()
    before = bench.output.read_bytes()
    report = bench.run()
    assert report.already_complete
    assert (report.ok, report.failed, report.kept, report.exit_code) == (16, 4, 20, 1)
    assert bench.output.read_bytes() == before


def test_only_lines_without_a_result_run_again(bench: Bench) -> None:
    ask(bench)
    kept = stopped(bench)
    asked: list[int] = []
    spy = byte_tokenizer()
    original = spy.encode
    spy.encode = lambda *some, **more: (asked.append(1), original(*some, **more))[1]  # type: ignore[method-assign]
    model = scripted_model()
    engine, _ = model.load()
    bench.run(lambda: type(model)(model.name, model.identity, model.names, lambda: (engine, spy)))
    done_bad = sum(1 for r in bench.results()[:20] if r["error"])
    assert len(asked) <= 20 - kept
    assert done_bad == 4
    check_whole(bench)


def test_a_torn_tail_is_cut_at_every_place_it_can_be(bench: Bench) -> None:
    """Records hold characters of several bytes, so some cuts fall inside one."""
    tokenizer = byte_tokenizer()
    bench.write(*[prompt("é", custom_id=f"标识-{i}", max_tokens=9) for i in range(2)])

    def model() -> Any:
        return scripted_model(spoken(tokenizer, "你好🎉"))

    bench.run(model, wall=lambda: 0.0)
    whole = bench.output.read_bytes()
    second = whole.index(b"\n") + 1
    assert "标识".encode() in whole
    assert "好".encode() in whole
    for cut in range(1, len(whole) + 1):
        bench.output.unlink(missing_ok=True)
        bench.files.partial.write_bytes(whole[:cut])
        report = bench.run(model, wall=lambda: 0.0)
        assert bench.output.read_bytes() == whole, cut
        assert report.kept == (cut >= second) + (cut == len(whole))


def test_a_whole_record_without_its_line_end_is_run_again(bench: Bench) -> None:
    ask(bench)
    bench.run()
    data = bench.output.read_bytes()
    bench.output.rename(bench.files.partial)
    bench.files.partial.write_bytes(data.rstrip(b"\n"))
    report = bench.run()
    assert report.kept == 19
    assert any("cut off" in note for note in report.notes)
    check_whole(bench)


@QUICK
@given(garbage=st.binary(max_size=40), keep=st.integers(0, 20))
def test_whatever_follows_the_last_complete_record_is_cut_off(bench: Bench, garbage: bytes, keep: int) -> None:
    ask(bench)
    bench.run(restart=True)
    records = bench.output.read_bytes().splitlines(keepends=True)
    bench.output.rename(bench.files.partial)
    bench.files.partial.write_bytes(b"".join(records[:keep]) + garbage)
    bench.run()
    check_whole(bench)


def test_a_record_of_another_job_is_no_record_of_this_one(bench: Bench) -> None:
    ask(bench)
    bench.run()
    first, second, *others = bench.output.read_bytes().splitlines(keepends=True)
    bench.output.rename(bench.files.partial)
    foreign = second.replace(b"batch_req_", b"batch_req_0")
    bench.files.partial.write_bytes(b"".join([first, foreign, *others]))
    assert bench.run().kept == 1
    check_whole(bench)


def test_an_output_is_never_made_of_too_few_results(bench: Bench) -> None:
    ask(bench)
    bench.run()
    job_id = bench.results()[0]["id"].split("_")[2]
    lines = bench.output.read_bytes().splitlines(keepends=True)
    bench.output.unlink()
    bench.files.partial.write_bytes(b"".join(lines[:7] + lines[8:]))
    with pytest.raises(JobError, match="results of 19 lines, and 20 were expected"):
        finishing.finish(bench.files, job_id, records=20, last_line=20, sort=True)
    assert not bench.output.exists()


@QUICK
@given(looks=st.lists(st.integers(0, 40), max_size=6), sort=st.booleans())
def test_stopped_any_number_of_times_the_results_are_the_same(bench: Bench, looks: list[int], sort: bool) -> None:
    ask(bench)
    first = True
    for stop_after in looks:
        bench.run(
            lambda: scripted_model(max_num_seqs=4), signals=StopAfter(stop_after), window=8, restart=first, sort=sort
        )
        first = False
    bench.run(restart=first, sort=sort)
    if not sort:
        records = bench.output.read_bytes().splitlines(keepends=True)
        bench.output.write_bytes(b"".join(sorted(records, key=lambda record: line_of(orjson.loads(record)))))
    check_whole(bench)


def test_errors_run_again_only_when_asked(bench: Bench) -> None:
    ask(bench)
    bench.run()
    assert bench.run().already_complete
    good = {line_of(r): r for r in bench.results() if not r["error"]}
    report = bench.run(retry_errors=True)
    assert (report.kept, report.ok, report.failed) == (16, 16, 4)
    check_whole(bench)
    assert {line_of(r): r for r in bench.results() if not r["error"]} == good


@pytest.mark.parametrize("sort", [True, False])
def test_a_retried_line_has_one_result_the_later_one(bench: Bench, sort: bool) -> None:
    bench.write(*[prompt("a" * (1 if i % 2 else 50), id=i) for i in range(6)])
    report = bench.run(lambda: scripted_model(num_blocks=1), sort=sort)
    assert (report.ok, report.failed) == (3, 3)
    report = bench.run(lambda: scripted_model(num_blocks=64), retry_errors=True, sort=sort)
    assert (report.ok, report.failed, report.exit_code) == (6, 0, 0)
    assert sorted(line_of(r) for r in bench.results()) == [1, 2, 3, 4, 5, 6]
    assert [r["error"] for r in bench.results()] == [None] * 6
    assert bench.run(retry_errors=True).already_complete


def test_a_stopped_retry_loses_nothing(bench: Bench) -> None:
    bench.write(*[prompt("a" * (1 if i % 2 else 50), id=i) for i in range(40)])
    bench.run(lambda: scripted_model(num_blocks=1))
    bench.run(lambda: scripted_model(max_num_seqs=1), retry_errors=True, signals=StopAfter(10), window=1)
    assert not bench.output.exists()
    report = bench.run(retry_errors=True)
    assert (report.ok, report.failed) == (40, 0)
    assert [line_of(r) for r in bench.results()] == list(range(1, 41))


# Another job's results are never mixed with this one's.


@pytest.mark.parametrize("state", ["under way", "complete"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"defaults": {"max_tokens": 5}}, "max_tokens (not set then, 5 now)"),
        ({"result_settings": {"max_model_len": 99}}, "max_model_len (not set then, 99 now)"),
        ({"strict_fields": True}, "strict_fields"),
        ({"identity": "1" * 64}, "the model (scripted 000000000000 then, scripted 111111111111 now)"),
        ({"input": None}, "the input (SHA-256"),
    ],
)
def test_another_jobs_results_are_refused_and_kept(bench: Bench, state: str, change: dict[str, Any], said: str) -> None:
    ask(bench)
    if state == "complete":
        bench.run()
    else:
        stopped(bench)
    held = bench.output if state == "complete" else bench.files.partial
    before = held.read_bytes()
    options = dict(change)
    if "input" in options:
        options = {}
        bench.input.write_bytes(bench.input.read_bytes() + b"\n")
    identity = options.pop("identity", "0" * 64)
    with pytest.raises(JobError) as caught:
        bench.run(lambda: scripted_model(identity=identity), **options)
    assert said in caught.value.message
    assert "--restart" in caught.value.message
    assert held.read_bytes() == before
    report = bench.run(lambda: scripted_model(identity=identity), restart=True, **options)
    assert report.kept == 0
    assert len(bench.results()) == 20


def test_settings_that_change_only_the_speed_may_differ(bench: Bench) -> None:
    ask(bench)
    stopped(bench)
    bench.run(lambda: scripted_model(max_num_seqs=3, max_num_batched_tokens=7), window=5, sort=True)
    check_whole(bench)


def test_the_order_of_the_output_may_still_be_chosen_later(bench: Bench) -> None:
    ask(bench)
    stopped(bench, sort=False)
    bench.run(sort=True)
    check_whole(bench)


def test_nothing_done_means_nothing_to_protect(bench: Bench) -> None:
    bench.write(*[prompt("a") for _ in range(20)])
    assert stopped(bench, looks=0) == 0
    bench.run(defaults={"max_tokens": 5})
    assert len(bench.results()) == 20


def test_a_file_that_is_not_ours_is_never_overwritten(bench: Bench) -> None:
    ask(bench)
    bench.output.write_text("precious")
    for restart in (False, True):
        with pytest.raises(JobError, match="remove it or choose another"):
            bench.run(restart=restart)
    assert bench.output.read_text() == "precious"


def test_an_output_that_was_edited_is_not_taken_for_complete(bench: Bench) -> None:
    ask(bench)
    bench.run()
    lines = bench.output.read_bytes().splitlines(keepends=True)
    bench.output.write_bytes(b"".join(lines[:-1]))
    with pytest.raises(JobError, match="was changed"):
        bench.run()


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b'{"format": "packhorse-job", "version": 99}'])
def test_a_damaged_sidecar_is_reported(bench: Bench, data: bytes) -> None:
    ask(bench)
    stopped(bench)
    bench.files.sidecar.write_bytes(data)
    with pytest.raises(JobError, match="--restart"):
        bench.run()
    bench.run(restart=True)
    check_whole(bench)


def test_results_without_a_sidecar_are_kept_until_told_otherwise(bench: Bench) -> None:
    ask(bench)
    stopped(bench)
    bench.files.sidecar.unlink()
    with pytest.raises(JobError, match="--restart"):
        bench.run()
    bench.run(restart=True)
    check_whole(bench)


# Two processes, and the last steps.


def test_two_processes_cannot_write_one_job(bench: Bench) -> None:
    ask(bench)
    fd = os.open(bench.files.lock, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.write(fd, b"123")
    with pytest.raises(JobError, match=r"Another process \(123\)"):
        bench.run(never)
    os.close(fd)
    bench.run()  # the lock went with its holder; the file may stay
    check_whole(bench)


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it runs but what the kernel does anyway."""


STEPS = ["sorting.write", "sorting.fsync", "sorting.replace", "sync_folder", "partial.unlink"]


@pytest.mark.parametrize("step", STEPS)
def test_killed_at_any_of_the_last_steps_the_next_start_finishes(
    bench: Bench, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(bench)

    def kill(*_: Any, **__: Any) -> Any:
        raise Killed

    with monkeypatch.context() as patch:
        if step == "sorting.write":
            patch.setattr(finishing, "_records", kill)
        elif step == "sorting.fsync":
            patch.setattr(
                finishing.os, "fsync", lambda fd: kill() if "sorting" in os.readlink(f"/proc/self/fd/{fd}") else None
            )
        elif step == "sync_folder":
            patch.setattr(finishing, "sync_folder", kill)
        else:
            name, method = step.split(".")
            original = getattr(Path, method)
            patch.setattr(
                Path,
                method,
                lambda self, *args, **kw: (
                    kill()
                    if self.suffix == f".{name}" and bench.output.exists() is (name == "partial")
                    else original(self, *args, **kw)
                ),
            )
        with pytest.raises(Killed):
            bench.run()
    report = bench.run()
    assert report.kept == 20
    check_whole(bench)
    assert sorted(p.name for p in bench.output.parent.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.job.json"]


def test_stopped_while_sorting_the_model_is_not_loaded_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(bench)
    with monkeypatch.context() as patch:
        patch.setattr(finishing, "_copy", lambda *_: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            bench.run()
    model = scripted_model()
    bench.run(lambda: type(model)(model.name, model.identity, model.names, lambda: pytest.fail("loaded")))
    check_whole(bench)


def test_standard_input_need_not_come_again(bench: Bench) -> None:
    ask(bench)
    data = bench.input.read_bytes()
    assert stopped(bench, input=None, stdin=io.BytesIO(data)) > 0
    assert bench.files.spool.read_bytes() == data
    bench.run(input=None, stdin=io.BytesIO(b""))
    check_whole(bench)


def test_other_standard_input_does_not_replace_what_a_job_needs(bench: Bench) -> None:
    ask(bench)
    data = bench.input.read_bytes()
    stopped(bench, input=None, stdin=io.BytesIO(data))
    with pytest.raises(JobError, match="the input"):
        bench.run(input=None, stdin=io.BytesIO(b'{"prompt": "other"}\n'))
    bench.run(input=None, stdin=io.BytesIO(data))
    check_whole(bench)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_once_and_the_second_acts(number: signal.Signals) -> None:
    caught: list[int] = []
    previous = signal.signal(number, lambda n, _: caught.append(n))
    try:
        with StopSignals() as signals:
            signal.raise_signal(number)
            assert signals.signum == number
            assert caught == []
            signal.raise_signal(number)
            assert caught == [number]
        with StopSignals() as signals:
            assert signals.signum is None
        signal.raise_signal(number)
        assert caught == [number, number]
    finally:
        signal.signal(number, previous)
