from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from packhorse.engine.random import stream_key, uniform
from packhorse.engine.sampler import SamplingBatch, _filter, _Row, sample

NINF = -np.inf


@dataclass(frozen=True)
class Settings:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def batch(rows: list[Settings], keys: list[int] | None = None, positions: list[int] | None = None) -> SamplingBatch:
    return SamplingBatch(
        temperature=np.array([row.temperature for row in rows], dtype=np.float32),
        top_k=np.array([row.top_k for row in rows], dtype=np.int32),
        top_p=np.array([row.top_p for row in rows], dtype=np.float32),
        min_p=np.array([row.min_p for row in rows], dtype=np.float32),
        keys=np.array(keys or [0] * len(rows), dtype=np.uint64),
        positions=np.array(positions or [0] * len(rows), dtype=np.uint64),
    )


def draws(logits: np.ndarray, setting: Settings, count: int, seed: int = 0) -> np.ndarray:
    """int[count]: what `count` draws of one stream give for the same row."""
    rows = np.repeat(logits[None].astype(np.float32), count, axis=0)
    tokens, usable = sample(rows, batch([setting] * count, [stream_key(seed, 0)] * count, list(range(count))))
    assert usable.all()
    return tokens


def kept_by_sorting(distances: np.ndarray, weights: np.ndarray, setting: Settings) -> list[int]:
    """The plain way: sort everything, then cut three times. What has no weight can be left in: it is never drawn."""
    top_p, min_p = float(np.float32(setting.top_p)), float(np.float32(setting.min_p))
    wide = weights.astype(np.float64)
    order = np.argsort(distances, kind="stable")
    if setting.top_k:
        order = order[: setting.top_k]
    if top_p < 1:
        before = np.concatenate([[0.0], np.cumsum(wide[order])[:-1]])
        order = order[(before < top_p * wide[order].sum()) | (np.arange(len(order)) == 0)]
    return [int(i) for i in order if wide[i] > 0 and (wide[i] >= min_p or i == order[0])]


def weighed(logits: np.ndarray, setting: Settings) -> tuple[np.ndarray, np.ndarray]:
    row = _Row(len(logits))
    row.weigh(logits, logits.max(), np.float32(setting.temperature))
    return row._distances, row._weights


def assert_kept_as_by_sorting(logits: np.ndarray, setting: Settings) -> None:
    distances, weights = weighed(logits, setting)
    top_p, min_p = float(np.float32(setting.top_p)), float(np.float32(setting.min_p))
    found = [int(i) for i in _filter(distances, weights, setting.top_k, top_p, min_p) if weights[i] > 0]
    expected = kept_by_sorting(distances, weights, setting)
    if found == expected:
        return
    # Sums in another order differ in the last bits: either is right where the mass that is kept lies on the edge.
    short, long = sorted((found, expected), key=len)
    assert long[: len(short)] == short
    wide = weights.astype(np.float64)
    mass = wide[np.argsort(distances, kind="stable")[: setting.top_k or None]].sum()
    np.testing.assert_allclose(wide[short].sum(), top_p * mass, rtol=1e-11)


values = st.one_of(
    st.floats(-20, 20, width=32),
    st.sampled_from([0.0, 1.0, -1.0, 0.0625, 5.0, 1e4, -1e4, 3e38, -3e38, NINF]),
)
settings_of = st.builds(
    Settings,
    temperature=st.sampled_from([1e-40, 1e-3, 0.1, 0.7, 1.0, 1.5, 100.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 3, 10, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 1e-9, 0.1, 0.3, 0.5, 0.9, 0.95, 0.999, 0.9999999]),
    min_p=st.sampled_from([0.0, 0.0, 1e-30, 0.05, 0.5, 1.0]),
)


@settings(max_examples=500, deadline=None)
@given(logits=st.lists(values, min_size=1, max_size=40), setting=settings_of)
@example(logits=[0.0] * 10, setting=Settings(top_p=0.3))
@example(logits=[0.0] * 10, setting=Settings(top_k=3))
@example(logits=[0.0, NINF, NINF], setting=Settings(top_k=2, top_p=0.9))
@example(logits=[i / 16 for i in range(40)], setting=Settings(top_k=7))
@example(logits=[0.0, 3.0, 3.0], setting=Settings(0.7, top_k=3, top_p=0.5, min_p=0.05))
def test_filters_keep_what_a_full_sort_keeps(logits: list[float], setting: Settings) -> None:
    row = np.array(logits, dtype=np.float32)
    if np.isfinite(row.max()):
        assert_kept_as_by_sorting(row, setting)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    size=st.sampled_from([1000, 5000, 50_257]),
    scale=st.sampled_from([0.01, 1.0, 5.0, 30.0]),
    rounded=st.booleans(),
    setting=settings_of,
)
def test_filters_keep_what_a_full_sort_keeps_in_a_large_vocabulary(
    seed: int, size: int, scale: float, rounded: bool, setting: Settings
) -> None:
    logits = np.random.default_rng(seed).normal(scale=scale, size=size).astype(np.float32)
    assert_kept_as_by_sorting(np.round(logits) if rounded else logits, setting)


@pytest.mark.parametrize(
    "setting",
    [
        Settings(),
        Settings(temperature=0.5),
        Settings(temperature=2.0, top_k=4),
        Settings(top_p=0.8),
        Settings(min_p=0.2),
        Settings(temperature=1.3, top_k=6, top_p=0.9, min_p=0.05),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(setting: Settings) -> None:
    logits = np.array([2.0, 1.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, NINF], dtype=np.float32)
    weights = np.exp(logits.astype(np.float64) / setting.temperature - logits.max() / setting.temperature)
    allowed = kept_by_sorting(-logits, weights, setting)
    count = 20_000
    counts = np.bincount(draws(logits, setting, count), minlength=len(logits))
    assert counts[[i for i in range(len(logits)) if i not in allowed]].sum() == 0
    expected = count * weights[allowed] / weights[allowed].sum()
    statistic = ((counts[allowed] - expected) ** 2 / expected).sum()
    assert statistic < 24.3  # chi-square of at most 7 degrees of freedom, p = 0.001


@settings(max_examples=150, deadline=None)
@given(
    logits=st.lists(st.lists(values, min_size=9, max_size=9), min_size=2, max_size=6),
    setting=st.lists(st.one_of(settings_of, st.just(Settings(temperature=0.0))), min_size=6, max_size=6),
    seed=st.integers(0, 2**64 - 1),
)
def test_a_row_does_not_depend_on_its_neighbours(logits: list[list[float]], setting: list[Settings], seed: int) -> None:
    rows = np.array(logits, dtype=np.float32)
    count = len(rows)
    keys, positions = [seed ^ i for i in range(count)], list(range(count))
    together, usable = sample(rows.copy(), batch(setting[:count], keys, positions))
    for i in range(count):
        alone, fine = sample(rows[i : i + 1].copy(), batch([setting[i]], [keys[i]], [positions[i]]))
        assert (alone[0], fine[0]) == (together[i], usable[i])
    backwards, _ = sample(rows[::-1].copy(), batch(setting[:count][::-1], keys[::-1], positions[::-1]))
    assert np.array_equal(backwards[::-1], together)


def test_logits_are_not_changed() -> None:
    rows = np.random.default_rng(0).normal(size=(4, 100)).astype(np.float32)
    before = rows.copy()
    sample(rows, batch([Settings(), Settings(0.0), Settings(top_k=3), Settings(0.5, 5, 0.9, 0.1)]))
    assert np.array_equal(rows, before)


def test_temperature_zero_takes_the_largest_logit_before_any_filter() -> None:
    rows = np.random.default_rng(1).normal(size=(50, 300)).astype(np.float32)
    best = rows.argmax(axis=1)
    greedy = [Settings(0.0), Settings(0.0, top_p=0.1), Settings(0.0, top_k=5, min_p=0.9), Settings(1.0, top_k=1)]
    for setting in [*greedy, Settings(1e-40), Settings(1.0, min_p=1.0), Settings(1.0, top_p=1e-9)]:
        tokens, _ = sample(rows, batch([setting] * 50, list(range(50)), list(range(50))))
        assert np.array_equal(tokens, best)


def test_the_first_of_equal_logits_is_the_greedy_one() -> None:
    rows = np.array([[1, 7, 7, 7], [7, 7, 1, 1]], dtype=np.float32)
    assert sample(rows, batch([Settings(0.0)] * 2))[0].tolist() == [1, 0]


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = np.array([NINF, 0.0, NINF, -1000.0, NINF], dtype=np.float32)
    for setting in (Settings(), Settings(top_k=5), Settings(top_p=0.999999), Settings(min_p=1e-30)):
        assert set(draws(logits, setting, 500).tolist()) == {1}


@pytest.mark.parametrize("draw", [0.0, 1 - 2**-53])
def test_the_smallest_and_the_largest_draw_give_a_token_that_can_be_drawn(
    draw: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("packhorse.engine.sampler.uniform", lambda keys, _: np.full(len(keys), draw))
    rows = np.array([[NINF, 1.0, 1.1, 1.3, NINF]], dtype=np.float32)
    for setting in (Settings(), Settings(0.3), Settings(top_k=2), Settings(top_p=0.9)):
        assert sample(rows, batch([setting]))[0][0] in (1, 2, 3)


@pytest.mark.parametrize("bad", [[1.0, np.nan, 0.0], [np.inf, 0.0, 0.0], [NINF] * 3, [np.nan] * 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_finite_peak_is_unusable_and_its_neighbours_are_served(
    bad: list[float], temperature: float
) -> None:
    rows = np.array([[0, 9, 0], bad, [0, 0, 9]], dtype=np.float32)
    tokens, usable = sample(rows, batch([Settings(temperature, top_k=2)] * 3))
    assert usable.tolist() == [True, False, True]
    assert tokens[[0, 2]].tolist() == [1, 2]


def test_a_row_uses_its_own_draw_and_each_position_another_one() -> None:
    logits = np.zeros(1000, dtype=np.float32)
    tokens = draws(logits, Settings(), 200, seed=7)
    keys = np.full(200, stream_key(7, 0), dtype=np.uint64)
    expected = np.floor(uniform(keys, np.arange(200, dtype=np.uint64)) * 1000)
    assert tokens.tolist() == expected.astype(int).tolist()
    assert len(set(tokens.tolist())) > 150
