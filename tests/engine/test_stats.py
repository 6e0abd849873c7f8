"""The numbers of EngineStats, against scenarios computed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from packhorse.engine.engine import Engine
from packhorse.engine.histogram import HistogramSnapshot
from packhorse.engine.request import Request
from packhorse.engine.sampling_params import SamplingParams
from tests.support.engines import finish_all, request, runner_of, scripted_engine
from tests.support.scripted import FakeClock


def timed(step_seconds: float = 1.0, **settings: Any) -> tuple[Engine, FakeClock]:
    """Each pass of the runner takes that long."""
    clock = FakeClock()
    engine = scripted_engine(clock=clock, **{"block_size": 4, "num_blocks": 32} | settings)
    runner_of(engine)._before_step = lambda _: clock.advance(step_seconds)
    return engine, clock


def totals(snapshot: HistogramSnapshot) -> tuple[int, float]:
    return snapshot.count, snapshot.total


def test_times_of_a_scenario_computed_by_hand() -> None:
    """Two places, steps of 1 s. In seconds, with a token at the end of each step:

    a   arrives 0   runs 0            tokens at 1 2 3    ends 3
    b   arrives 0   runs 0            tokens at 1 … 5    ends 5
    c   arrives 0   runs 3 (after a)  tokens at 4 5      ends 5
    d   arrives 1   runs 5            token at 6         ends 6
    """
    engine, clock = timed(max_num_seqs=2)
    for name, max_tokens in {"a": 3, "b": 5, "c": 2}.items():
        engine.submit(request(name, [1, 2, 3], max_tokens=max_tokens))
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.waiting_tokens, stats.prompt_tokens) == (0, 3, 9, 9)
    assert stats.concurrency_limit == 2
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.waiting_tokens) == (2, 1, 3)
    assert (stats.blocks_used, stats.blocks_total) == (2, 32)
    engine.submit(request("d", [1, 2, 3, 4], max_tokens=1))
    outputs = finish_all(engine)
    stats = engine.stats()
    assert clock.now == 6
    assert totals(stats.queue_time) == (4, 0 + 0 + 3 + 4)
    assert totals(stats.time_to_first_token) == (4, 1 + 1 + 4 + 5)
    assert totals(stats.inter_token_latency) == (2 + 4 + 1, 7)
    assert totals(stats.request_latency) == (4, 3 + 5 + 5 + 5)
    assert totals(stats.batch_size) == (6, 2 + 2 + 2 + 2 + 2 + 1)
    assert (stats.steps, stats.batched_sequences, stats.mean_batch_size) == (6, 11, 11 / 6)
    assert (stats.generated_tokens, stats.computed_tokens, stats.prompt_tokens) == (11, 13 + 2 + 4 + 1, 13)
    assert (stats.finished, stats.failed_requests, stats.aborted_tokens) == ({"length": 4}, 0, 0)
    assert (stats.num_running, stats.num_waiting, stats.waiting_tokens, stats.blocks_used) == (0, 0, 0, 0)
    metrics = outputs["d"].metrics
    assert metrics is not None
    assert (metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time) == (5, 6, 6)


def test_requests_are_counted_by_how_they_ended_and_lost_tokens_apart() -> None:
    engine, clock = timed(following=lambda _: 7, max_num_seqs=8)
    engine.submit(request("length", [1], max_tokens=2))
    engine.submit(request("stop", [2], max_tokens=9, stop_token_ids=[7]))
    engine.submit(request("abort", [3], max_tokens=9))
    engine.submit(Request("late", [4], SamplingParams(temperature=0.0, max_tokens=9), timeout=3.5))
    engine.submit(request("two", [5], n=2, temperature=1.0, seed=1, max_tokens=9))
    for _ in range(2):
        engine.step()
    engine.abort("abort")  # has two tokens
    for _ in range(3):
        engine.step()  # "late" ends at 4 with four tokens
    assert clock.now == 5
    engine.abort("two")  # each of both has five
    engine.step()
    stats = engine.stats()
    assert stats.finished == {"length": 1, "stop": 1, "abort": 2, "error": 1}
    assert stats.failed_requests == 1
    assert stats.aborted_tokens == 2 + 4 + 5 * 2
    assert stats.generated_tokens == 2 + 1 + 2 + 4 + 5 * 2
    assert stats.request_latency.count == 5


def test_a_preempted_request_waits_once_and_its_gap_is_a_gap_between_tokens() -> None:
    """Another one takes the place it had, so it comes back elsewhere."""
    engine, clock = timed(max_num_seqs=3)
    for name in "ab":
        engine.submit(request(name, [1, 2, 3], max_tokens=4))
    engine.step()
    engine._scheduler.preempt_last()
    clock.advance(10)
    engine.submit(Request("c", [4], SamplingParams(temperature=0.0, max_tokens=1), priority=-9))
    finish_all(engine)
    stats = engine.stats()
    assert stats.preemptions == 1
    assert totals(stats.queue_time) == (3, 0)
    assert totals(stats.time_to_first_token) == (3, 3)
    assert totals(stats.inter_token_latency) == (6, 2 * (11 + 1 + 1))
    assert stats.generated_tokens == 9
    assert stats.computed_tokens == 2 * 6 + 1 + 3  # the prompt of the preempted one twice; it fills no block


def test_times_of_several_choices_are_those_of_the_request() -> None:
    engine, _ = timed(max_num_seqs=1)
    engine.submit(request("a", [1], n=3, temperature=1.0, max_tokens=2))
    finish_all(engine)
    stats = engine.stats()
    assert totals(stats.queue_time) == (1, 0)
    assert totals(stats.time_to_first_token) == (1, 1)
    assert totals(stats.request_latency) == (1, 6)
    assert totals(stats.inter_token_latency) == (3, 3)
    assert stats.finished == {"length": 1}


def test_a_failed_step_counts_no_tokens() -> None:
    engine, _ = timed()
    engine.submit(request("a", [1, 2], max_tokens=5))
    engine.step()

    def broken(_: int) -> None:
        raise RuntimeError

    runner_of(engine)._before_step = broken
    engine.step()
    stats = engine.stats()
    assert (stats.steps, stats.computed_tokens, stats.generated_tokens, stats.aborted_tokens) == (1, 2, 1, 1)
    assert stats.finished == {"error": 1}


def test_blocks_are_used_cached_or_empty() -> None:
    engine, _ = timed()
    engine.submit(request("a", [1] * 9, max_tokens=4))
    engine.step()
    assert (engine.stats().blocks_used, engine.stats().blocks_cached) == (3, 0)
    finish_all(engine)
    assert (engine.stats().blocks_used, engine.stats().blocks_cached) == (0, 3)


def test_a_snapshot_is_of_its_moment() -> None:
    engine, _ = timed()
    engine.submit(request("a", [1], max_tokens=1))
    before = engine.stats()
    finish_all(engine)
    assert (before.steps, before.num_waiting, before.finished, before.request_latency.count) == (0, 1, {}, 0)
    with pytest.raises(AttributeError):
        before.steps = 5  # type: ignore[misc]
