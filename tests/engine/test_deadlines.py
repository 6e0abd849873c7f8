"""Requests that must end, or must have begun, by a certain moment."""

from __future__ import annotations

from typing import Any

import pytest

from packhorse.engine.engine import Engine
from packhorse.engine.outputs import RequestOutput
from packhorse.engine.request import Request
from packhorse.engine.sampling_params import SamplingParams
from packhorse.errors import DeadlineExceeded
from tests.support.engines import finish_all, scripted_engine
from tests.support.scripted import FakeClock


def make(**settings: Any) -> tuple[Engine, FakeClock]:
    clock = FakeClock()
    return scripted_engine(clock=clock, **{"num_blocks": 12, "block_size": 4} | settings), clock


def submit(engine: Engine, name: str, *, length: int = 3, max_tokens: int = 20, n: int = 1, **limits: Any) -> None:
    params = SamplingParams(temperature=1.0 if n > 1 else 0.0, seed=3, max_tokens=max_tokens, n=n)
    engine.submit(Request(name, [ord(name[0]) % 97] * length, params, **limits))


def expired(outputs: list[RequestOutput]) -> list[str]:
    for output in outputs:
        if output.error is not None:
            assert isinstance(output.error, DeadlineExceeded)
            assert (output.error.code, output.error.status) == ("deadline_exceeded", 504)
            assert output.finished
    return [output.request_id for output in outputs if output.error is not None]


def holds_nothing(engine: Engine) -> bool:
    engine.check_integrity()
    stats = engine.stats()
    return (stats.num_running, stats.num_waiting, stats.blocks_used, engine.num_unfinished) == (0, 0, 0, 0)


@pytest.mark.parametrize("where", ["in the queue", "in prefill", "decoding", "preempted"])
def test_a_timeout_frees_everything_at_once_wherever_the_request_is(where: str) -> None:
    engine, clock = make(max_num_seqs=1 if where == "in the queue" else 4, max_num_batched_tokens=8)
    if where in ("in the queue", "preempted"):
        submit(engine, "other", max_tokens=45)
        engine.step()
    submit(engine, "late", length=20 if where == "in prefill" else 3, timeout=5)
    for _ in range({"in the queue": 2, "in prefill": 1, "decoding": 4, "preempted": 1}[where]):
        engine.step()
    (sequence,) = engine._states["late"].sequences
    if where == "preempted":
        assert engine._scheduler.preempt_last() is sequence
    assert sequence.waiting == (where in ("in the queue", "preempted"))
    clock.now = 4.999
    assert expired(engine.step()) == []
    if where == "preempted" and not sequence.waiting:
        assert engine._scheduler.preempt_last() is sequence
    clock.now = 5.0
    outputs = engine.step()
    assert expired(outputs) == ["late"]
    assert outputs[0].outputs[0].finish_reason == "error"
    assert ("in the queue" in str(outputs[0].error)) == (where == "in the queue")
    assert "5 s" in str(outputs[0].error)
    assert (sequence.row, sequence.waiting) == (-1, False)
    engine.abort("other")
    engine.step()
    assert holds_nothing(engine)


def test_what_was_generated_before_a_timeout_is_given_back() -> None:
    engine, clock = make()
    submit(engine, "a", timeout=5)
    submit(engine, "b", max_tokens=6)
    for _ in range(3):
        engine.step()
    clock.now = 5
    (output,) = engine.step()
    assert len(output.outputs[0].token_ids) == 3
    rest = finish_all(engine)["b"]
    engine, _ = make()
    submit(engine, "b", max_tokens=6)
    assert finish_all(engine)["b"].outputs == rest.outputs


def test_a_queue_timeout_matters_only_until_the_request_has_run() -> None:
    engine, clock = make(max_num_seqs=1)
    submit(engine, "runs", queue_timeout=5, max_tokens=12)
    submit(engine, "waits", queue_timeout=5)
    engine.step()
    clock.now = 4.9
    assert expired(engine.step()) == []
    clock.now = 5
    assert expired(engine.step()) == ["waits"]
    outputs = finish_all(engine)
    assert outputs["runs"].error is None
    assert len(outputs["runs"].outputs[0].token_ids) == 12


def test_a_queue_timeout_does_not_matter_to_who_was_sent_back_to_the_queue() -> None:
    engine, clock = make(max_num_seqs=2)
    submit(engine, "other")
    submit(engine, "back", queue_timeout=5)
    engine.step()
    engine._scheduler.preempt_last()
    clock.now = 6
    assert expired(engine.step()) == []
    assert finish_all(engine)["back"].error is None


def test_the_earlier_of_both_limits_counts() -> None:
    engine, clock = make(max_num_seqs=1)
    submit(engine, "runs", max_tokens=40)
    submit(engine, "queue first", timeout=9, queue_timeout=3)
    submit(engine, "end first", timeout=4, queue_timeout=9)
    engine.step()
    for moment, names in ((2, []), (3, ["queue first"]), (3.5, []), (4, ["end first"]), (9, [])):
        clock.now = moment
        assert expired(engine.step()) == names


def test_all_choices_end_at_a_timeout_and_those_that_were_done_stay_as_they_are() -> None:
    engine, clock = make(max_num_seqs=1)
    submit(engine, "a", n=3, max_tokens=4, timeout=5)
    for _ in range(6):
        engine.step()
    clock.now = 5
    (output,) = engine.step()
    assert [choice.finish_reason for choice in output.outputs] == ["length", "error", "error"]
    assert [len(choice.token_ids) for choice in output.outputs] == [4, 2, 0]
    assert holds_nothing(engine)


@pytest.mark.parametrize("passing", [0.0, 1.0])
def test_the_deadline_of_an_earlier_request_with_the_same_id_is_not_the_later_ones(passing: float) -> None:
    engine, clock = make()
    submit(engine, "same", timeout=5, queue_timeout=4)
    engine.abort("same")
    engine.step()
    clock.advance(passing)
    submit(engine, "same", timeout=50)
    clock.now = 5
    assert expired(engine.step()) == []
    clock.now = passing + 50
    assert expired(engine.step()) == ["same"]


def test_who_ended_in_time_ends_once() -> None:
    engine, clock = make()
    submit(engine, "a", max_tokens=2, timeout=5)
    assert finish_all(engine)["a"].error is None
    clock.now = 5
    assert engine.step() == []
    assert engine.stats().failed_requests == 0


def test_an_aborted_request_that_also_ran_out_of_time_is_aborted() -> None:
    engine, clock = make()
    submit(engine, "a", timeout=5)
    engine.step()
    engine.abort("a")
    clock.now = 5
    (output,) = engine.step()
    assert (output.error, output.outputs[0].finish_reason) == (None, "abort")


@pytest.mark.parametrize("policy", ["continuous", "static", "dynamic"])
def test_wake_at_does_not_oversleep_a_deadline(policy: str) -> None:
    engine, clock = make(policy=policy, batch_size=4, max_wait_ms=1e6, length_buckets=())
    engine.more_to_come = True
    submit(engine, "a", timeout=7)
    submit(engine, "b", queue_timeout=3)
    if policy == "continuous":
        assert engine.wake_at() == clock.now
        return
    found = []
    for _ in range(2):
        assert engine.step() == []
        clock.now = engine.wake_at()
        found += [(clock.now, name) for name in expired(engine.step())]
    assert found == [(3.0, "b"), (7.0, "a")]
    assert engine.wake_at() == float("inf")


def test_a_member_that_times_out_leaves_its_batch() -> None:
    engine, clock = make(policy="static", batch_size=2)
    for name in "abcd":
        submit(engine, name, max_tokens=3 if name != "b" else 30, timeout=5 if name == "b" else None)
    for _ in range(10):
        engine.step()
    assert (engine.stats().num_running, engine.stats().num_waiting) == (1, 2)
    clock.now = 5
    assert expired(engine.step()) == ["b"]
    assert engine.stats().num_running == 2
