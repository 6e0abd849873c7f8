from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from packhorse.engine.logprobs import token_logprobs
from packhorse.engine.outputs import LOGPROB_FLOOR

rows = npst.arrays(np.float32, st.integers(1, 50), elements=st.floats(-80, 80, width=32) | st.just(-np.inf)).filter(
    lambda row: np.isfinite(row).any()
)


@settings(deadline=None)  # the first call may compile
@given(logits=rows, token=st.integers(0, 49), count=st.integers(0, 20))
def test_log_probabilities_equal_a_direct_computation(logits: np.ndarray, token: int, count: int) -> None:
    token %= len(logits)
    wide = logits.astype(np.float64)
    with np.errstate(divide="ignore"):
        exact = np.log(np.exp(wide - wide.max()) / np.exp(wide - wide.max()).sum())
    expected = np.maximum(exact, LOGPROB_FLOOR)
    found = token_logprobs(logits, token, count)
    assert found.token_id == token
    np.testing.assert_allclose(found.logprob, max((wide - np.logaddexp.reduce(wide))[token], LOGPROB_FLOOR), atol=1e-9)
    order = sorted(range(len(logits)), key=lambda i: (-wide[i], i))[:count]
    assert list(found.top_ids) == order
    exact_enough = expected[order] > -700  # beyond it the direct computation underflows
    np.testing.assert_allclose(np.array(found.top_logprobs)[exact_enough], expected[order][exact_enough], atol=1e-9)
    assert found.rank == 1 + sum(value > wide[token] for value in wide)


def test_minus_infinity_is_reported_as_the_floor() -> None:
    found = token_logprobs(np.array([0, -np.inf, -np.inf], dtype=np.float32), 1, 3)
    assert found.logprob == LOGPROB_FLOOR == -9999.0
    assert found.top_logprobs == (0.0, LOGPROB_FLOOR, LOGPROB_FLOOR)


def test_large_logits_do_not_overflow() -> None:
    found = token_logprobs(np.array([1e6, 1e6], dtype=np.float32), 0, 1)
    np.testing.assert_allclose(found.logprob, np.log(0.5))


def test_equal_tokens_are_listed_by_id() -> None:
    assert token_logprobs(np.zeros(1000, dtype=np.float32), 500, 3).top_ids == (0, 1, 2)
