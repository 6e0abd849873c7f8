from __future__ import annotations

from typing import Any

import pytest

from packhorse.errors import ContextLengthExceeded, InvalidRequest
from tests.support.engines import VOCAB, finish_all, request, scripted_engine


def test_a_request_larger_than_the_cache_is_refused_on_arrival_with_the_sizes() -> None:
    engine = scripted_engine(num_blocks=20, block_size=16)
    with pytest.raises(ContextLengthExceeded, match=r"400 tokens and at most 320 fit.*num_blocks") as refusal:
        engine.submit(request("large", [1] * 400))
    assert (refusal.value.code, refusal.value.status) == ("context_length_exceeded", 400)
    for number in range(3):
        engine.submit(request(f"small {number}", [number] * 5, max_tokens=4))
    outputs = finish_all(engine)
    assert {len(output.outputs[0].token_ids) for output in outputs.values()} == {4}
    assert len(outputs) == 3


def test_growth_beyond_the_cache_ends_with_length() -> None:
    engine = scripted_engine(num_blocks=20, block_size=16)
    engine.submit(request("a", [1] * 200, max_tokens=200))
    engine.submit(request("b", [2] * 200, max_tokens=None))
    outputs = finish_all(engine)
    for output in outputs.values():
        assert len(output.outputs[0].token_ids) == 120
        assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(("length", "generated"), [(8190, 2), (8191, 1), (8192, 0)])
def test_a_prompt_up_to_the_limit_gets_what_is_left(length: int, generated: int) -> None:
    engine = scripted_engine(lambda _: 7, context_length=8192, num_blocks=600, max_num_batched_tokens=4096)
    assert engine.max_model_len == 8192
    engine.submit(request("a", [3] * length, max_tokens=5))
    output = finish_all(engine)["a"]
    assert output.outputs[0].token_ids == [7] * generated
    assert output.outputs[0].finish_reason == "length"
    assert output.error is None


def test_one_token_more_than_the_context_is_refused() -> None:
    engine = scripted_engine(context_length=8192, num_blocks=600)
    with pytest.raises(ContextLengthExceeded, match="8193 tokens and at most 8192 fit: it is the model's context"):
        engine.submit(request("a", [3] * 8193))
    assert engine.num_unfinished == 0


@pytest.mark.parametrize(
    ("limits", "max_len", "remedy"),
    [
        ({"context_length": 50}, 50, "context length"),
        ({"num_blocks": 3}, 48, "num_blocks or memory_utilization"),
        ({"max_model_len": 47}, 47, "raise max_model_len"),
        ({"max_model_len": 500, "context_length": 60, "num_blocks": 3}, 48, "num_blocks"),
    ],
)
def test_the_limit_is_the_least_of_context_cache_and_setting(limits: dict[str, Any], max_len: int, remedy: str) -> None:
    engine = scripted_engine(**limits)
    assert engine.max_model_len == max_len
    with pytest.raises(ContextLengthExceeded, match=remedy):
        engine.submit(request("a", [1] * (max_len + 1)))
    engine.submit(request("a", [1] * max_len))


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        [[]],
        [[1, 2]],
        [[1], [2, 3]],
        "text",
        None,
        5,
        [1.5],
        [1, None],
        ["1"],
        [-1],
        [1, VOCAB],
        [2**40],
        [2**70],
        [True, False],
        [{"a": 1}],
    ],
    ids=str,
)
def test_a_malformed_prompt_is_refused_and_its_neighbour_goes_on(prompt: Any) -> None:
    engine = scripted_engine()
    engine.submit(request("fine", [1, 2, 3], max_tokens=8))
    expected = [output.outputs[0].token_ids for output in finish_all(engine).values()]
    engine.submit(request("fine", [1, 2, 3], max_tokens=8))
    engine.step()
    with pytest.raises(InvalidRequest) as refusal:
        engine.submit(request("malformed", prompt))
    assert refusal.value.param == "prompt"
    engine.check_integrity()
    assert [output.outputs[0].token_ids for output in finish_all(engine).values()] == expected


@pytest.mark.parametrize("params", [{"logit_bias": {VOCAB: 1.0}}, {"stop_token_ids": [3, VOCAB]}])
def test_token_ids_of_parameters_must_be_the_models(params: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=f"names token id {VOCAB}; ids go from 0 to {VOCAB - 1}") as refusal:
        scripted_engine().submit(request("a", [1], **params))
    assert refusal.value.param in params


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(InvalidRequest, match="stop needs a tokenizer") as refusal:
        scripted_engine().submit(request("a", [1], stop="x"))
    assert refusal.value.param == "stop"


def test_an_id_may_be_used_again_once_its_request_is_done() -> None:
    engine = scripted_engine()
    for _ in range(3):
        engine.submit(request("same", [1, 2], max_tokens=2))
        with pytest.raises(InvalidRequest, match="'same' is under way") as refusal:
            engine.submit(request("same", [1, 2]))
        assert refusal.value.param == "request_id"
        assert len(finish_all(engine)) == 1


def test_an_id_may_be_used_again_after_an_abort() -> None:
    engine = scripted_engine()
    engine.submit(request("same", [1, 2]))
    engine.step()
    engine.abort("same")
    assert [output.outputs[0].finish_reason for output in engine.step()] == ["abort"]
    engine.submit(request("same", [1, 2], max_tokens=1))
    assert finish_all(engine)["same"].outputs[0].finish_reason == "length"
