"""Who enters when: continuous, dynamic and static batching over one scheduler."""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.engine.engine import Engine
from packhorse.engine.lengths import STEPS_PER_DOUBLING, LengthHistogram
from packhorse.engine.policy import LEARN_EVERY, LEARNED_BUCKETS
from packhorse.engine.request import Request
from packhorse.engine.sampling_params import SamplingParams
from packhorse.errors import OutOfMemory
from tests.support.engines import finish_all, request, runner_of, scripted_engine
from tests.support.scripted import FakeClock


def submit(engine: Engine, ids: Many[str], length: int = 3, max_tokens: int = 4, priority: int = 0) -> None:
    for name in ids:
        prompt = [ord(name[0]) % 97] * length
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        engine.submit(Request(name, prompt, params, priority=priority))


def running(engine: Engine) -> str:
    """The names of what runs, in order of urgency."""
    return "".join(s.request_id for s in engine._scheduler.running)


def seen(engine: Engine, steps: int) -> list[str]:
    """What ran (began its step, rather) in each of the next steps."""
    names = []
    schedule = engine._scheduler.schedule

    def spy(now: float, more_to_come: bool) -> object:
        plan = schedule(now, more_to_come)
        names.append(running(engine) if plan is not None else "")
        return plan

    engine._scheduler.schedule = spy  # type: ignore[method-assign,assignment]
    for _ in range(steps):
        engine.step()
        engine.check_integrity()
    engine._scheduler.schedule = schedule  # type: ignore[method-assign]
    return names


# Static


def test_static_admits_a_batch_at_once_and_nobody_until_all_are_done() -> None:
    engine = scripted_engine(policy="static", batch_size=3)
    submit(engine, "a", max_tokens=2)
    submit(engine, "b", max_tokens=5)
    submit(engine, "cdefg", max_tokens=3)
    assert seen(engine, 12) == ["abc", "abc", "bc", "b", "b", "def", "def", "def", "g", "g", "g", ""]


def test_static_waits_for_a_full_batch_only_while_more_is_to_come() -> None:
    clock = FakeClock()
    engine = scripted_engine(policy="static", batch_size=3, clock=clock)
    engine.more_to_come = True
    submit(engine, "ab")
    clock.advance(1e6)
    assert seen(engine, 3) == ["", "", ""]
    assert engine.wake_at() == math.inf
    submit(engine, "c")
    assert seen(engine, 1) == ["abc"]
    submit(engine, "d")
    assert seen(engine, 5) == ["abc", "abc", "abc", "", ""]
    engine.more_to_come = False
    assert seen(engine, 1) == ["d"]


def test_nobody_joins_a_static_batch_that_began_unfilled() -> None:
    """Not even when its members took the whole token budget of their first step."""
    for budget in (6, 7, 64):
        engine = scripted_engine(policy="static", batch_size=4, max_num_batched_tokens=budget, max_num_seqs=4)
        submit(engine, "ab", length=3)
        assert seen(engine, 1) == ["ab"]
        submit(engine, "c")
        assert seen(engine, 4) == ["ab", "ab", "ab", "c"]


def test_a_static_batch_that_needs_several_steps_to_enter_still_is_one_batch() -> None:
    engine = scripted_engine(policy="static", batch_size=3, max_num_batched_tokens=4, max_num_seqs=4)
    submit(engine, "abcde", length=4, max_tokens=3)
    assert seen(engine, 3) == ["a", "ab", "abc"]
    assert all(set(names) <= set("abc") or set(names) <= set("de") for names in seen(engine, 20))
    assert engine.num_unfinished == 0


def test_who_aborts_in_a_batch_leaves_it() -> None:
    engine = scripted_engine(policy="static", batch_size=2)
    submit(engine, "abcd", max_tokens=9)
    assert seen(engine, 2) == ["ab", "ab"]
    engine.abort("a")
    engine.abort("c")
    assert seen(engine, 2) == ["b", "b"]
    engine.abort("b")
    assert seen(engine, 1) == ["d"]


def test_the_seat_of_one_that_aborts_before_it_entered_is_nobodys() -> None:
    engine = scripted_engine(policy="static", batch_size=2, max_num_batched_tokens=4, max_num_seqs=2)
    submit(engine, "ab", length=4, max_tokens=5)
    assert seen(engine, 1) == ["a"]
    engine.abort("b")
    assert seen(engine, 1) == ["a"]
    submit(engine, "c", length=1)
    assert seen(engine, 4) == ["a", "a", "a", "c"]


# Dynamic


def test_dynamic_starts_when_full() -> None:
    engine = scripted_engine(policy="dynamic", batch_size=3, max_wait_ms=1000, length_buckets=())
    engine.more_to_come = True
    submit(engine, "ab")
    assert seen(engine, 2) == ["", ""]
    submit(engine, "cd")
    assert seen(engine, 5) == ["abc", "abc", "abc", "abc", ""]


@given(
    arrivals=st.lists(st.floats(0, 100, allow_nan=False), min_size=1, max_size=4),
    max_wait=st.floats(0, 1000, allow_nan=False),
)
@settings(deadline=None, max_examples=100)
def test_dynamic_starts_when_its_oldest_has_waited_and_wake_at_says_when(
    arrivals: list[float], max_wait: float
) -> None:
    """Exactly then: whoever sleeps until `wake_at` must find something to do."""
    clock = FakeClock()
    engine = scripted_engine(policy="dynamic", batch_size=8, max_wait_ms=max_wait, length_buckets=(), clock=clock)
    engine.more_to_come = True
    for number, arrival in enumerate(sorted(arrivals)):
        clock.now = arrival
        submit(engine, "abcd"[number])
    begins = engine.wake_at()
    assert begins == pytest.approx(max(min(arrivals) + max_wait / 1000, clock.now))
    if begins > clock.now:
        assert seen(engine, 1) == [""]
        clock.now = math.nextafter(begins, 0)
        assert seen(engine, 1) == [""]
        clock.now = begins
    assert seen(engine, 1) == ["abcd"[: len(arrivals)]]


def test_batches_of_different_lengths_run_side_by_side() -> None:
    engine = scripted_engine(policy="dynamic", batch_size=2, length_buckets=(8,), max_num_seqs=8)
    submit(engine, "AB", length=10, max_tokens=40)
    submit(engine, "ab", max_tokens=3)
    submit(engine, "cd", max_tokens=2)
    assert seen(engine, 6) == ["ABab"] * 3 + ["ABcd"] * 2 + ["AB"]


def test_a_short_request_never_waits_for_a_long_one() -> None:
    engine = scripted_engine(policy="dynamic", batch_size=2, length_buckets=(8, 32), max_num_seqs=8)
    submit(engine, "XYZ", length=30, max_tokens=60)
    engine.step()
    for name in "abcdef":
        submit(engine, name, length=3, max_tokens=2)
        assert name in seen(engine, 1)[0]
        engine.step()
    assert running(engine) == "XY"


def test_a_bucket_holds_lengths_up_to_its_edge_of_prompt_and_output() -> None:
    engine = scripted_engine(policy="dynamic", batch_size=2, length_buckets=(8, 32))
    for length, max_tokens, bucket in ((4, 4, 0), (4, 5, 1), (31, 1, 1), (32, 1, 2), (8, None, 0), (9, None, 1)):
        name = f"{length}/{max_tokens}"
        engine.submit(request(name, [1] * length, max_tokens=max_tokens))
        assert engine._states[name].sequences[0].bucket == bucket, name


def test_the_bucket_that_waited_longest_goes_first() -> None:
    clock = FakeClock()
    engine = scripted_engine(policy="dynamic", batch_size=1, length_buckets=(8,), max_num_seqs=1, clock=clock)
    submit(engine, "x", max_tokens=1)
    clock.advance(1)
    submit(engine, "L", length=10, max_tokens=2)
    clock.advance(1)
    submit(engine, "s", max_tokens=2)
    clock.advance(1)
    submit(engine, "M", length=10, max_tokens=1)
    assert seen(engine, 6) == ["x", "L", "L", "s", "s", "M"]


@pytest.mark.parametrize("short_share", [0.1, 0.2, 0.5, 0.8, 0.95])
def test_learnt_buckets_split_a_bimodal_distribution(short_share: float) -> None:
    rng = np.random.default_rng(1)
    engine = scripted_engine(policy="dynamic", batch_size=4, num_blocks=4000)
    for number in range(5 * LEARN_EVERY):
        short = rng.random() < short_share
        length = int(rng.integers(10, 40)) if short else int(rng.integers(500, 1500))
        engine.submit(request(str(number), [1] * (length - 5), max_tokens=5))
    late = [s for s in engine._scheduler.waiting if int(s.request_id) >= 4 * LEARN_EVERY]
    assert len({s.bucket for s in late}) == LEARNED_BUCKETS
    short_ones = {s.bucket for s in late if s.expected_len < 40}
    assert not short_ones & {s.bucket for s in late if s.expected_len >= 500}


@given(st.lists(st.integers(1, 1 << 21), max_size=60), st.integers(1, 6))
def test_learnt_edges_rise_and_leave_no_bucket_empty(lengths: list[int], count: int) -> None:
    histogram = LengthHistogram()
    for length in lengths:
        histogram.add(length)
    edges = histogram.buckets(count)
    assert len(edges) < count
    assert list(edges) == sorted(set(edges))
    assert histogram.total == len(lengths) == sum(n for _, _, n in histogram.rows())
    bounds = [0, *edges, math.inf]
    for low, high in pairwise(bounds):
        assert not lengths or any(low < min(length, 1 << 20) <= high for length in lengths)


def test_each_length_is_counted_where_it_belongs() -> None:
    for length in [*range(1, 300), 1023, 1024, 1025, 4095, 65536, (1 << 20) - 1]:
        histogram = LengthHistogram()
        histogram.add(length)
        ((low, high, count),) = histogram.rows()
        assert low <= length <= high
        assert count == 1
        assert high <= low * 2 ** (1 / 4) + 1


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 40)), min_size=1, max_size=7, unique_by=lambda pair: pair[0]),
    st.integers(1, 5),
)
def test_no_other_edges_hold_requests_up_less(counts: list[tuple[int, int]], count: int) -> None:
    histogram = LengthHistogram()
    for step, many in counts:
        for _ in range(many):
            histogram.add(math.ceil(2 ** (step / STEPS_PER_DOUBLING)))
    rows = histogram.rows()

    def held_up(edges: Many[int]) -> float:
        total = 0.0
        for low, high in pairwise([0, *edges, math.inf]):
            members = [(longest, many) for _, longest, many in rows if low < longest <= high]
            total += sum(many * members[-1][0] / longest for longest, many in members)
        return total

    ends = [longest for _, longest, _ in rows[:-1]]
    others = [edges for size in range(count) for edges in combinations(ends, size)]
    assert held_up(histogram.buckets(count)) == pytest.approx(min(map(held_up, others)))


# Batches and preemption


@pytest.mark.parametrize("policy", ["static", "dynamic"])
def test_a_preempted_member_comes_back_into_its_batch(policy: str) -> None:
    engine = scripted_engine(policy=policy, batch_size=3, num_blocks=7, block_size=4, length_buckets=())
    submit(engine, "abcdef", length=4, max_tokens=12)
    batches = seen(engine, 200)
    assert engine.num_unfinished == 0
    assert engine.stats().preemptions > 0
    first_of_second = next(i for i, names in enumerate(batches) if set(names) & set("def"))
    assert not set("".join(batches[first_of_second:])) & set("abc")


@pytest.mark.parametrize("policy", ["static", "dynamic"])
def test_a_preempted_member_comes_back_before_more_urgent_newcomers(policy: str) -> None:
    """Else the batch waits for its member, and the member for a place that the newcomer at the head may not take."""
    engine = scripted_engine(policy=policy, batch_size=2, num_blocks=5, block_size=4, length_buckets=())
    submit(engine, "ab", length=4, max_tokens=12)
    while not engine.stats().preemptions:
        engine.step()
    submit(engine, "xyz", priority=-5)
    assert set(finish_all(engine, max_steps=300)) == set("abxyz")


# Continuous


def test_continuous_admits_in_the_next_step() -> None:
    engine = scripted_engine(policy="continuous", max_num_seqs=4)
    engine.more_to_come = True  # is nothing to this policy
    submit(engine, "abc", max_tokens=30)
    assert seen(engine, 4) == ["abc"] * 4
    submit(engine, "d", max_tokens=1)
    submit(engine, "e", max_tokens=3)
    assert seen(engine, 4) == ["abcd", "abce", "abce", "abce"]


def test_a_finished_sequence_makes_room_in_the_next_step() -> None:
    engine = scripted_engine(max_num_seqs=2)
    submit(engine, "a", max_tokens=2)
    submit(engine, "b", max_tokens=5)
    submit(engine, "cd", max_tokens=3)
    assert seen(engine, 6) == ["ab", "ab", "bc", "bc", "bc", "d"]


# When to call again


@pytest.mark.parametrize("policy", ["continuous", "static", "dynamic"])
@pytest.mark.parametrize("more_to_come", [False, True])
def test_who_sleeps_until_wake_at_never_sleeps_while_something_may_run(policy: str, more_to_come: bool) -> None:
    clock = FakeClock()
    engine = scripted_engine(policy=policy, batch_size=2, max_num_seqs=2, clock=clock, length_buckets=())
    engine.more_to_come = more_to_come
    submit(engine, "abcdef", max_tokens=2)
    for _ in range(20):
        if not engine.num_unfinished:
            break
        assert engine.wake_at() < math.inf
        clock.now = max(clock.now, engine.wake_at())
        engine.step()
    assert engine.num_unfinished == 0
    assert clock.now == 0, "it slept although something could run"
    assert engine.wake_at() == math.inf


def test_wake_at_is_now_while_an_output_is_ready() -> None:
    clock = FakeClock()
    engine = scripted_engine(policy="static", batch_size=2, clock=clock)
    engine.more_to_come = True
    submit(engine, "a")
    assert engine.wake_at() == math.inf
    engine.abort("a")
    assert engine.wake_at() == clock.now
    engine.step()
    assert engine.wake_at() == math.inf


# A machine with too little memory for what runs


def crowded(engine: Engine, sequences: int) -> None:
    """More sequences than that in a step are out of memory, in halves too."""
    runner = runner_of(engine)
    run = runner.run

    def refuse(batch: object) -> object:
        if len(batch.context_lens) > sequences:  # type: ignore[attr-defined]
            raise OutOfMemory("too many")
        return run(batch)  # type: ignore[arg-type]

    runner.run = refuse  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("policy", ["continuous", "static", "dynamic"])
@pytest.mark.parametrize("sequences", [1, 2, 3])
def test_a_step_out_of_memory_runs_with_fewer_and_everybody_is_served(policy: str, sequences: int) -> None:
    def run(limit: int) -> tuple[Engine, dict[str, list[int]]]:
        engine = scripted_engine(policy=policy, batch_size=8, max_num_seqs=8, length_buckets=())
        crowded(engine, limit)
        submit(engine, "abcdefgh", length=3, max_tokens=20)
        found = finish_all(engine, max_steps=8 * 20 * 3)
        assert all(output.error is None for output in found.values())
        return engine, {name: output.outputs[0].token_ids for name, output in found.items()}

    _, expected = run(8)
    engine, found = run(sequences)
    assert found == expected
    tried = engine.stats()
    assert tried.preemptions > 0
    assert tried.computed_tokens <= 2 * 8 * 23, "most of the work was thrown away"
