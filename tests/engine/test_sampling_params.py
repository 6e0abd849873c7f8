from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.engine.sampling_params import (
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    SamplingParams,
)
from packhorse.errors import InvalidRequest

NAN, INF = float("nan"), float("inf")

REFUSED: list[tuple[str, list[Any]]] = [
    ("n", [0, -1, 1.0, "1", True, None, MAX_CHOICES + 1]),
    ("temperature", [-0.01, 100.1, NAN, INF, "1", True, None]),
    ("top_k", [-2, 1.5, 5.0, "3", True, False]),
    ("top_p", [0, -0.1, 1.01, NAN, INF, "1", True, None]),
    ("min_p", [-0.1, 1.01, NAN, "0", True, None]),
    ("repetition_penalty", [0, 5e-324, 0.0099, -1, 100.1, NAN, INF, "1", True, None]),
    ("presence_penalty", [-2.1, 2.1, NAN, INF, "1", True, None]),
    ("frequency_penalty", [-2.1, 2.1, NAN, -INF, "1", True, None]),
    ("logit_bias", [None, [1], "5", {"x": 1}, {-1: 1}, {5: 101}, {5: -100.5}, {5: NAN}, {5: "1"}, {5: True}]),
    ("logit_bias", [dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)]),
    ("seed", [1.5, "1", True]),
    ("stop", ["", [""], ["a", ""], 5, [5], [None], b"a", {"a": 1}, ["a"] * (MAX_STOP_STRINGS + 1)]),
    ("stop", ["a" * (MAX_STOP_LENGTH + 1), ["ok", "x" * 5000]]),
    ("stop_token_ids", [-1, [-1], [1.0], ["1"], "12", True, [True], [None]]),
    ("ignore_eos", [1, "true", None]),
    ("min_tokens", [-1, 1.0, True, None]),
    ("max_tokens", [-1, 1.0, "5", True]),
    ("logprobs", [-1, MAX_LOGPROBS + 1, 1.0, True]),
    ("prompt_logprobs", [-1, MAX_LOGPROBS + 1, 1.0, True]),
    ("echo", [1, "yes", None]),
    ("skip_special_tokens", [0, None]),
    ("include_stop_str_in_output", [0, None]),
]

ACCEPTED: list[tuple[str, Any, Any]] = [
    ("n", MAX_CHOICES, MAX_CHOICES),
    ("temperature", 0, 0.0),
    ("temperature", 100, 100.0),
    ("top_k", -1, 0),
    ("top_k", None, 0),
    ("top_k", 10**9, 10**9),
    ("top_p", 1e-9, 1e-9),
    ("top_p", 1, 1.0),
    ("min_p", 0, 0.0),
    ("min_p", 1, 1.0),
    ("repetition_penalty", 0.01, 0.01),
    ("repetition_penalty", 100, 100.0),
    ("presence_penalty", -2, -2.0),
    ("frequency_penalty", 2, 2.0),
    ("logit_bias", {"5": -100, 6: 100}, {5: -100.0, 6: 100.0}),
    ("logit_bias", {}, {}),
    ("seed", None, None),
    ("seed", -1, -1),
    ("seed", 2**80, 2**80),
    ("stop", None, ()),
    ("stop", [], ()),
    ("stop", "x", ("x",)),
    ("stop", ["x", "x"], ("x", "x")),
    ("stop", ("a" * MAX_STOP_LENGTH,) * MAX_STOP_STRINGS, ("a" * MAX_STOP_LENGTH,) * MAX_STOP_STRINGS),
    ("stop_token_ids", None, ()),
    ("stop_token_ids", 0, (0,)),
    ("stop_token_ids", [7, 8], (7, 8)),
    ("stop_token_ids", {7}, (7,)),
    ("max_tokens", None, None),
    ("max_tokens", 1, 1),
    ("min_tokens", 16, 16),
    ("logprobs", 0, 0),
    ("logprobs", MAX_LOGPROBS, MAX_LOGPROBS),
    ("prompt_logprobs", 0, 0),
    ("ignore_eos", True, True),
    ("echo", True, True),
]


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in REFUSED for value in values], ids=str)
def test_a_bad_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        SamplingParams(**{field: value})
    assert refusal.value.param == field
    assert refusal.value.message.startswith(field)
    assert len(refusal.value.message) < 300  # a huge value is not recited
    assert refusal.value.status == 400


@pytest.mark.parametrize(("field", "value", "kept"), ACCEPTED, ids=str)
def test_a_value_on_the_boundary_is_accepted(field: str, value: Any, kept: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == kept


def test_defaults_are_those_of_the_api_that_the_names_come_from() -> None:
    assert SamplingParams().model_dump() == {
        "n": 1,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "seed": None,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "min_tokens": 0,
        "max_tokens": 16,
        "logprobs": None,
        "prompt_logprobs": None,
        "echo": False,
        "skip_special_tokens": True,
        "include_stop_str_in_output": False,
    }


def test_every_field_is_in_the_table_of_refusals() -> None:
    assert {field for field, _ in REFUSED} == set(SamplingParams.model_fields)


def test_an_unknown_field_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="max_token is not a sampling parameter") as refusal:
        SamplingParams(max_token=5)
    assert (refusal.value.param, refusal.value.code) == ("max_token", "unknown_parameter")


@pytest.mark.parametrize("scores", [{"echo": True}, {"prompt_logprobs": 0}])
def test_max_tokens_zero_is_for_scoring_only(scores: dict[str, Any]) -> None:
    assert SamplingParams(max_tokens=0, **scores).max_tokens == 0
    with pytest.raises(InvalidRequest, match="ask for echo or prompt_logprobs") as refusal:
        SamplingParams(max_tokens=0, logprobs=1)
    assert refusal.value.param == "max_tokens"


def test_min_tokens_above_max_tokens_is_refused_with_both_numbers() -> None:
    with pytest.raises(InvalidRequest, match=r"min_tokens \(9\) is more than max_tokens \(8\)") as refusal:
        SamplingParams(min_tokens=9, max_tokens=8)
    assert refusal.value.param == "min_tokens"
    assert SamplingParams(min_tokens=9, max_tokens=None).min_tokens == 9


def test_parameters_cannot_be_changed_afterwards() -> None:
    params = SamplingParams()
    with pytest.raises(Exception, match="frozen"):
        params.temperature = 2.0  # type: ignore[misc]
    params.logit_bias[5] = 1.0
    assert SamplingParams().logit_bias == {}


@pytest.mark.parametrize(
    ("settings", "greedy"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 0, "top_p": 0.1}, True),
        ({"temperature": 1, "top_k": 1}, True),
        ({"temperature": 1, "top_k": 2}, False),
        ({"temperature": 1e-9}, False),
        ({}, False),
    ],
)
def test_both_spellings_of_greedy_are_greedy(settings: dict[str, Any], greedy: bool) -> None:
    assert SamplingParams(**settings).greedy is greedy


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def refused_field(**params: Any) -> str | None:
    try:
        SamplingParams(**params)
    except InvalidRequest as refusal:
        return refusal.param
    return "nothing"


@given(field=st.sampled_from(sorted(SamplingParams.model_fields)), value=json_values)
def test_any_value_is_either_accepted_or_refused_by_name(field: str, value: Any) -> None:
    # min_tokens is compared with max_tokens, so that either may be named for both.
    assert refused_field(**{field: value}) in ("nothing", field, "min_tokens")
