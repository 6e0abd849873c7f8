"""What a step does beside the model, counted in function calls, so that a loaded machine changes nothing."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from benchmarks.scheduling import loaded_engine

from packhorse.engine.engine import Engine
from tests.support.engines import request, scripted_engine

POLICIES = ("continuous", "dynamic", "static")


def calls_of(action: Callable[[], object]) -> int:
    """Functions called while it runs, Python's and C's."""
    count = 0

    def note(_: FrameType, event: str, __: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def calls_of_steps(engine: Engine, steps: int = 16) -> int:
    """Of as many steps as it takes each sequence to fill a block."""
    return calls_of(lambda: [engine.step() for _ in range(steps)])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_does_the_same_however_many_wait(policy: str) -> None:
    counts = [calls_of_steps(loaded_engine(32, waiting, 60, policy)) for waiting in (1, 10, 10_000)]
    assert max(counts) == min(counts)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_does_the_same_however_many_run_but_for_the_blocks_they_fill(policy: str) -> None:
    few, many = (calls_of_steps(loaded_engine(running, 5, 60, policy)) for running in (8, 256))
    assert many - few <= 24 * (256 - 8)  # in 16 steps every sequence fills one block
    assert few < 16 * 300


@pytest.mark.parametrize("blocks", [17, 40])
def test_a_head_of_the_queue_that_finds_no_room_costs_the_same_however_many_are_behind_it(blocks: int) -> None:
    counts = []
    for waiting in (4, 5000):
        engine = scripted_engine(lambda _: 1, num_blocks=blocks, max_num_seqs=64)
        for number in range(waiting):
            engine.submit(request(str(number), [number % 97] * 250, max_tokens=5000))
        for _ in range(2):
            engine.step()
        stats = engine.stats()
        assert stats.num_running < 3
        assert stats.num_waiting > 0
        counts.append(calls_of(engine.step))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("policy", POLICIES)
def test_arrivals_and_aborts_cost_the_same_however_many_wait(policy: str) -> None:
    counts = []
    for waiting in (10, 5000):
        engine = loaded_engine(4, waiting, 60, policy)
        arrival = request("new", [1, 2, 3], max_tokens=4)
        middle = str(4 + waiting // 2)
        counts.append(
            (calls_of(lambda e=engine, r=arrival: e.submit(r)), calls_of(lambda e=engine, m=middle: e.abort(m)))
        )
    assert counts[0] == counts[1]


def test_a_queue_of_the_aborted_is_left_behind_at_once() -> None:
    """Each is passed over once, not in every step."""
    engine = scripted_engine(lambda _: 1, max_num_seqs=1)
    for number in range(3000):
        engine.submit(request(str(number), [number % 97], max_tokens=40))
    engine.step()
    usual = calls_of(engine.step)
    for number in range(1, 2999):
        engine.abort(str(number))
    engine.step()
    engine.abort("0")
    engine.step()
    assert engine.stats().num_running == 1
    assert engine.num_unfinished == 1
    assert abs(calls_of(engine.step) - usual) < 50


@pytest.mark.parametrize("policy", POLICIES)
def test_statistics_cost_the_same_however_many_wait(policy: str) -> None:
    counts = [calls_of(loaded_engine(4, waiting, 60, policy).stats) for waiting in (10, 5000)]
    assert counts[0] == counts[1]
