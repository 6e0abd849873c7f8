"""Who goes first: priorities that waiting makes up for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.engine.engine import Engine
from packhorse.engine.request import Request
from packhorse.engine.sampling_params import SamplingParams
from packhorse.errors import InvalidRequest
from tests.support.engines import finish_all, scripted_engine
from tests.support.scripted import FakeClock


def submit(engine: Engine, name: str, priority: Any = 0, *, length: int = 3, max_tokens: int = 4, n: int = 1) -> None:
    params = SamplingParams(temperature=1.0 if n > 1 else 0.0, seed=1, max_tokens=max_tokens, n=n)
    engine.submit(Request(name, [1] * length, params, priority=priority))


def finished_in_order(engine: Engine) -> list[str]:
    order = []
    while engine.num_unfinished:
        order += [output.request_id for output in engine.step()]
        engine.check_integrity()
    return order


def test_the_lower_number_goes_first_and_arrival_decides_between_equals() -> None:
    engine = scripted_engine(max_num_seqs=1)
    for name, priority in {"a": 0, "b": 5, "c": -5, "d": 0, "e": -100, "f": 100, "g": 5}.items():
        submit(engine, name, priority)
    assert finished_in_order(engine) == ["e", "c", "a", "d", "b", "g", "f"]


@given(
    st.lists(st.tuples(st.floats(0, 100, allow_nan=False), st.integers(-100, 100)), min_size=2, max_size=12),
    st.sampled_from([0.5, 10.0, 1000.0]),
)
@settings(deadline=None, max_examples=60)
def test_the_order_is_arrival_put_back_by_priority(arrivals: list[tuple[float, int]], priority_seconds: float) -> None:
    clock = FakeClock()
    engine = scripted_engine(max_num_seqs=1, priority_seconds=priority_seconds, clock=clock)
    arrivals.sort()
    for number, (arrival, priority) in enumerate(arrivals):
        clock.now = arrival
        submit(engine, str(number), priority, max_tokens=1)
    ranks = [(arrival + priority * priority_seconds, i) for i, (arrival, priority) in enumerate(arrivals)]
    assert finished_in_order(engine) == [str(number) for _, number in sorted(ranks)]


def test_a_running_request_is_not_put_off_by_a_more_urgent_one() -> None:
    engine = scripted_engine(max_num_seqs=2)
    submit(engine, "low 1", 5, max_tokens=4)
    submit(engine, "low 2", 5, max_tokens=6)
    engine.step()
    submit(engine, "low 3", 5)
    submit(engine, "high", -5)
    assert finished_in_order(engine) == ["low 1", "low 2", "high", "low 3"]
    assert engine.stats().preemptions == 0


@pytest.mark.parametrize("policy", ["continuous", "dynamic", "static"])
def test_a_low_request_under_a_steady_stream_of_high_ones_runs_within_its_handicap(policy: str) -> None:
    """10 s a step of priority: one of priority 3 goes before every one of priority -1 that came 40 s after it."""
    clock = FakeClock()
    engine = scripted_engine(
        policy=policy, batch_size=2, max_num_seqs=2, clock=clock, length_buckets=(), priority_seconds=10
    )
    engine.more_to_come = True
    submit(engine, "low", 3, max_tokens=2)
    number, low = 0, engine._states["low"]
    started = None
    while started is None:
        assert clock.now < 100, "it starves"
        while engine.stats().num_waiting < 6:  # there is always someone more urgent
            submit(engine, str(number), -1, max_tokens=2)
            number += 1
        engine.step()
        engine.check_integrity()
        clock.advance(1.0)
        started = low.first_scheduled_time
    # Those who came within 40 s go first; each takes two steps and two run at once, and up to six wait.
    assert 40 < started <= 40 + 2 * 6 / 2 + 2
    assert number > 30


def test_without_a_stream_of_others_a_low_request_runs_at_once() -> None:
    engine = scripted_engine()
    submit(engine, "low", 100)
    engine.step()
    assert engine.stats().num_running == 1


@pytest.mark.parametrize("priority", [-101, 101, 10**30, 1.5, "high", None, float("nan"), True, [0]], ids=str)
def test_a_bad_priority_is_refused_by_name(priority: Any) -> None:
    engine = scripted_engine()
    with pytest.raises(InvalidRequest, match=r"priority is .*: it must be a whole number from -100 to 100") as refusal:
        submit(engine, "a", priority)
    assert refusal.value.param == "priority"
    assert engine.num_unfinished == 0
    engine.check_integrity()


@pytest.mark.parametrize("field", ["timeout", "queue_timeout"])
@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan"), "5", True], ids=str)
def test_a_bad_deadline_is_refused_by_name(field: str, seconds: Any) -> None:
    engine = scripted_engine()
    with pytest.raises(InvalidRequest, match=f"{field} is .*: it must be a positive number of seconds") as refusal:
        engine.submit(Request("a", [1], SamplingParams(), **{field: seconds}))
    assert refusal.value.param == field
    assert engine.num_unfinished == 0


@pytest.mark.parametrize("order", ["urgent first", "urgent last"])
def test_the_least_urgent_is_preempted_and_the_most_urgent_never(order: str) -> None:
    engine = scripted_engine(num_blocks=8, block_size=4, max_num_seqs=4)
    names = {"urgent": -5, "usual 1": 0, "usual 2": 0, "low": 5}
    for name in list(names)[:: 1 if order == "urgent first" else -1]:
        submit(engine, name, names[name], length=4, max_tokens=24)
    outputs = finish_all(engine)
    preempted = {name: output.metrics.num_preemptions for name, output in outputs.items() if output.metrics}
    assert preempted["urgent"] == 0
    assert preempted["low"] > 0
    assert preempted["low"] >= max(preempted["usual 1"], preempted["usual 2"])
    assert len({tuple(output.outputs[0].token_ids) for output in outputs.values()}) == 1


def test_a_newcomer_that_is_more_urgent_is_not_the_one_to_be_preempted() -> None:
    engine = scripted_engine(num_blocks=6, block_size=4, max_num_seqs=4)
    submit(engine, "usual", 0, length=4, max_tokens=20)
    engine.step()
    submit(engine, "urgent", -1, length=4, max_tokens=20)
    outputs = finish_all(engine)
    counts = {name: output.metrics.num_preemptions for name, output in outputs.items() if output.metrics}
    assert counts["urgent"] == 0
    assert counts["usual"] > 0


def test_a_preempted_request_keeps_its_place() -> None:
    clock = FakeClock()
    engine = scripted_engine(num_blocks=6, block_size=4, max_num_seqs=3, clock=clock)
    for name in ("first", "second", "third"):
        submit(engine, name, length=4, max_tokens=16)
    while not engine.stats().preemptions:
        engine.step()
    clock.advance(1)
    for number in range(4):
        submit(engine, f"later {number}", length=1, max_tokens=1)
    order = finished_in_order(engine)
    assert order.index("second") < order.index("later 0")


def test_prefills_share_the_budget_by_urgency() -> None:
    engine = scripted_engine(max_num_batched_tokens=8, max_num_seqs=4)
    submit(engine, "usual", 0, length=30, max_tokens=1)
    engine.step()
    submit(engine, "urgent", -1, length=20, max_tokens=1)
    engine.step()  # the running one goes on with the whole budget: nobody enters
    submit(engine, "low", 1, length=30, max_tokens=1)
    assert finished_in_order(engine) == ["usual", "urgent", "low"]


def test_all_choices_of_a_request_have_its_priority() -> None:
    engine = scripted_engine(max_num_seqs=2)
    submit(engine, "runs", max_tokens=3)
    engine.step()
    submit(engine, "usual", 0)
    submit(engine, "urgent", -3, n=4)
    assert finished_in_order(engine) == ["runs", "urgent", "usual"]
