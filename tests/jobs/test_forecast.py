"""The time that is left goes by tokens, and is said only as well as it is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.engine.stats import Outstanding
from packhorse.jobs.forecast import TimeLeft, time_left
from packhorse.jobs.report import JobProgress
from tests.jobs.scripted import Bench, prompt, scripted_model
from tests.support.scripted import FakeClock

RATE, STEP = 100.0, 0.05
"""Tokens a second of all together, and seconds from one token of a sequence to its next."""


def left(sequences: list[tuple[int, int]], **known: Any) -> TimeLeft | None:
    """Of sequences that have generated so many tokens and may generate so many more."""
    generated, most_left = (np.array([s[i] for s in sequences], dtype=np.int32) for i in (0, 1))
    pace = {"tokens_per_s": RATE, "token_seconds": STEP}
    return time_left(Outstanding(generated, most_left), **{"unread_lines": 0} | pace | known)


def test_one_long_answer_at_the_end_is_not_six_seconds() -> None:
    """99 lines of 10 tokens are done in 10 s; the last has 200 tokens and may have 7,800 more, one every 50 ms."""
    found = left([(200, 7800)], finished_lines=99, finished_tokens=990)
    assert found == TimeLeft(likely=200 * STEP, most=7800 * STEP)


def test_in_the_middle_of_even_lines_it_is_the_tokens_that_are_left() -> None:
    found = left([(5, 15)] * 8, unread_lines=100, finished_lines=50, finished_tokens=500)
    assert found is not None
    assert found.likely == pytest.approx((8 * 5 + 100 * 10) / RATE)
    assert found.most is None, "nobody knows how long unread lines may become"


def test_a_line_cannot_be_longer_than_it_may() -> None:
    found = left([(990, 10), (3, 2)], finished_lines=4, finished_tokens=400)
    assert found == TimeLeft(10 * STEP, 10 * STEP)


def test_before_anything_is_finished_only_the_limit_is_known_and_that_only_when_all_is_read() -> None:
    assert left([(3, 100)], finished_lines=0, finished_tokens=0) == TimeLeft(None, 100 * STEP)
    assert left([(3, 100)], finished_lines=0, finished_tokens=0, unread_lines=1) is None
    assert left([(0, 100)], finished_lines=0, finished_tokens=0, token_seconds=None) is None
    assert left([(0, 100)], finished_lines=0, finished_tokens=0, tokens_per_s=0.0) is None


@given(
    sequences=st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 4000)), max_size=20),
    lines=st.integers(0, 50),
    tokens=st.integers(0, 5000),
    unread=st.integers(0, 100),
)
def test_what_is_likely_is_never_more_than_what_is_possible(
    sequences: list[tuple[int, int]], lines: int, tokens: int, unread: int
) -> None:
    found = left(sequences, finished_lines=lines, finished_tokens=tokens, unread_lines=unread)
    if found is not None and found.likely is not None:
        assert found.likely >= 0
        assert found.most is None or found.likely <= found.most + 1e-9


def test_a_job_with_one_long_line_says_so_in_its_progress(bench: Bench) -> None:
    """Steps take a second: 20 lines end in the first ten seconds, the last needs 190 more of its 200."""
    clock = FakeClock()
    seen: list[JobProgress] = []

    class Ticking:
        def __init__(self) -> None:
            self.model = scripted_model(clock=clock)

        def load(self) -> Any:
            engine, tokenizer = self.model.load()
            step = engine.step

            def timed() -> Any:
                clock.advance(1.0)
                return step()

            engine.step = timed  # type: ignore[method-assign]
            return engine, tokenizer

    ticking = Ticking()
    model = type(ticking.model)(ticking.model.name, ticking.model.identity, ticking.model.names, ticking.load)
    bench.write(*[prompt("a", max_tokens=10, ignore_eos=True)] * 20, prompt("b", max_tokens=200, ignore_eos=True))
    bench.run(lambda: model, on_progress=seen.append, clock=clock)
    [half] = [p for p in seen if p.stage == "running" and p.elapsed == 100.0]
    assert half.done == 20
    assert half.left is not None
    assert half.left.most == pytest.approx(100.0, rel=0.05)
    assert half.left.likely == pytest.approx(100.0, rel=0.05)
