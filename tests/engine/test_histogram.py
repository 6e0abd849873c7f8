from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.engine.histogram import COUNTS, SECONDS, Histogram

VALUES = st.lists(st.floats(1.01e-4, 7000, allow_nan=False), min_size=1, max_size=60)


def filled(values: list[float]) -> Histogram:
    histogram = Histogram()
    for value in values:
        histogram.observe(value)
    return histogram


def test_milliseconds_and_minutes_each_have_a_bucket_of_their_own() -> None:
    """A token of a fast machine, a long prompt, a batch that takes minutes."""
    values = [0.005, 0.150, 75.0, 700.0]
    snapshot = filled(values).snapshot()
    assert snapshot.count == 4
    assert snapshot.total == math.fsum(values)
    assert snapshot.mean == math.fsum(values) / 4
    assert [count for count in snapshot.counts if count] == [1, 1, 1, 1]
    assert not snapshot.counts[-1]
    for share, value in zip((0.25, 0.5, 0.75, 1.0), values, strict=True):
        assert value <= snapshot.quantile(share) <= value * 1.6


def test_edges_reach_from_a_tenth_of_a_millisecond_to_beyond_an_hour() -> None:
    assert SECONDS[0] == 1e-4
    assert SECONDS[-1] >= 3600
    assert list(SECONDS) == sorted(set(SECONDS))
    assert max(high / low for low, high in pairwise(SECONDS)) < 1.7


@given(VALUES, st.floats(0.01, 1))
def test_a_quantile_is_off_by_a_bucket_at_most(values: list[float], share: float) -> None:
    found = filled(values).snapshot().quantile(share)
    true = sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
    assert true / 1.7 <= found <= true * 1.7


@given(VALUES, st.lists(st.floats(0, 1), min_size=2, max_size=5))
def test_quantiles_rise(values: list[float], shares: list[float]) -> None:
    snapshot = filled(values).snapshot()
    found = [snapshot.quantile(share) for share in sorted(shares)]
    assert found == sorted(found)


@given(VALUES)
def test_many_values_at_once_are_the_same_as_one_by_one(values: list[float]) -> None:
    together = Histogram()
    together.observe(np.array(values))
    found, expected = together.snapshot(), filled(values).snapshot()
    assert found.counts == expected.counts
    assert found.total == pytest.approx(expected.total, rel=1e-12)
    assert found.count == len(values)


def test_a_value_on_an_edge_is_below_it() -> None:
    """As in Prometheus: le means up to and including."""
    for i, edge in enumerate(SECONDS):
        assert filled([edge]).snapshot().counts[i] == 1
        assert filled([math.nextafter(edge, math.inf)]).snapshot().counts[i + 1] == 1


def test_what_lies_beyond_the_last_edge_is_counted_and_reported_as_that_edge() -> None:
    snapshot = filled([1e6, 1e7]).snapshot()
    assert (snapshot.counts[-1], snapshot.count, snapshot.total) == (2, 2, 1.1e7)
    assert snapshot.quantile(0.5) == SECONDS[-1]


def test_nothing_observed_is_nothing() -> None:
    histogram = Histogram(COUNTS)
    histogram.observe(np.zeros(0))
    snapshot = histogram.snapshot()
    assert (snapshot.count, snapshot.total, snapshot.mean, snapshot.quantile(0.99)) == (0, 0.0, 0.0, 0.0)


def test_a_snapshot_does_not_change() -> None:
    histogram = filled([1.0])
    snapshot = histogram.snapshot()
    histogram.observe(2.0)
    assert (snapshot.count, snapshot.total) == (1, 1.0)
    assert (histogram.snapshot().count, histogram.snapshot().total) == (2, 3.0)
