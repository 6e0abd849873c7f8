from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.engine.logits_processors import changes_logits, process
from packhorse.engine.sampling_params import SamplingParams


def processed(
    logits: list[float], prompt: list[int], output: list[int], stop_ids: tuple[int, ...] = (), **params: Any
) -> list[float]:
    row = np.array(logits, dtype=np.float32)
    ids = [np.array(tokens, dtype=np.int32) for tokens in (prompt, output, list(stop_ids))]
    process(row, SamplingParams(**params), *ids)
    return [float(value) for value in row]


def test_repetition_divides_positive_logits_and_multiplies_negative_ones_of_prompt_and_output() -> None:
    assert processed([2, -2, 4, -4, 0, 3], [0, 1], [2, 3], repetition_penalty=2.0) == [1, -4, 2, -8, 0, 3]


def test_repetition_counts_a_token_once_however_often_it_came() -> None:
    assert processed([8.0, 8.0], [0, 0, 0], [0, 0], repetition_penalty=2.0) == [4, 8]


def test_presence_and_frequency_look_at_the_output_only() -> None:
    assert processed([1, 1, 1, 1], [0, 3], [1, 1, 2], presence_penalty=0.5) == [1, 0.5, 0.5, 1]
    assert processed([1, 1, 1, 1], [0, 3], [1, 1, 2], frequency_penalty=0.25) == [1, 0.5, 0.75, 1]
    assert processed([1, 1, 1], [], [1], frequency_penalty=-0.5, presence_penalty=-1.0) == [1, 2.5, 1]


def test_all_penalties_together_in_their_order() -> None:
    found = processed([6, 1], [0], [0, 0], repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    assert found == [6 / 2 - 2 * 0.5 - 0.25, 1]


def test_a_bias_is_added_once_after_penalties() -> None:
    assert processed([4, 1], [0], [0], repetition_penalty=2.0, logit_bias={0: 10, 1: -3.5}) == [12, -2.5]


def test_stop_ids_cannot_come_before_min_tokens() -> None:
    assert processed([1, 2, 3], [0], [0], (1, 2), min_tokens=2) == [1, -np.inf, -np.inf]
    assert processed([1, 2, 3], [0], [0, 0], (1, 2), min_tokens=2) == [1, 2, 3]


def test_a_bias_cannot_bring_a_forbidden_stop_id_back() -> None:
    assert processed([1, 2], [0], [], (1,), min_tokens=1, logit_bias={1: 100})[1] == -np.inf


def test_tokens_never_seen_are_not_touched() -> None:
    """No padding is penalized: nothing but the sequence's own tokens counts, and ids are not counted from zero."""
    found = processed([5.0] * 6, [4], [3], repetition_penalty=1.3, frequency_penalty=1.05, presence_penalty=1.0)
    assert [i for i, value in enumerate(found) if value == 5.0] == [0, 1, 2, 5]


@pytest.mark.parametrize(
    ("params", "changes"),
    [
        ({}, False),
        ({"temperature": 0.3, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "logprobs": 3}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"logit_bias": {1: 0.5}}, True),
        ({"min_tokens": 1}, True),
    ],
)
def test_what_changes_logits_is_known_beforehand(params: dict[str, Any], changes: bool) -> None:
    assert changes_logits(SamplingParams(**params)) is changes


ids = st.lists(st.integers(0, 9), max_size=20)


@given(
    logits=st.lists(st.floats(-50, 50, width=32), min_size=10, max_size=10),
    prompt=ids,
    output=ids,
    repetition=st.floats(0.125, 3, width=32),
    presence=st.floats(-2, 2, width=32),
    frequency=st.floats(-2, 2, width=32),
)
def test_penalties_equal_a_loop_over_the_vocabulary(
    logits: list[float], prompt: list[int], output: list[int], repetition: float, presence: float, frequency: float
) -> None:
    expected = []
    for token, value in enumerate(logits):
        if token in prompt or token in output:
            value = value / repetition if value > 0 else value * repetition
        value -= output.count(token) * frequency + (presence if token in output else 0)
        expected.append(value)
    found = processed(
        logits, prompt, output, repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)
