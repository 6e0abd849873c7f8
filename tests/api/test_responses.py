"""Outputs become the bodies that OpenAI's clients read."""

from __future__ import annotations

from typing import Any

import pytest

from packhorse.api.errors import error_body
from packhorse.api.requests import engine_requests, parse_request, tokenize
from packhorse.api.responses import _by_text, prompt_offsets, response_body
from packhorse.engine.engine import Engine
from packhorse.engine.outputs import CompletionOutput, Logprob, RequestOutput
from packhorse.errors import ContextLengthExceeded, ModelMismatch, StepError
from packhorse.text.tokenizer import Tokenizer
from tests.support.engines import finish_all, scripted_engine
from tests.support.scripted import scripts
from tests.support.tokenizers import small_tokenizer


def answer(engine: Engine, tokenizer: Tokenizer, endpoint: Any, body: dict[str, Any]) -> dict[str, Any]:
    """Through the whole way: body, requests, engine, body."""
    request = parse_request(endpoint, body)
    made = engine_requests(request, tokenize(request, tokenizer), "r")
    for one in made:
        engine.submit(one)
    outputs = finish_all(engine)
    return response_body(
        request,
        [outputs[one.request_id] for one in made],
        request_id="r",
        model="m",
        created=1_700_000_000,
        tokenizer=tokenizer,
    )


def saying(tokenizer: Tokenizer, prompt: list[int], ids: list[int], **settings: Any) -> Engine:
    return scripted_engine(scripts({tuple(prompt): ids}), tokenizer=tokenizer, **settings)


def test_a_chat_completion_has_openais_shape() -> None:
    tokenizer = small_tokenizer()
    messages = [{"role": "user", "content": "Hello"}]
    prompt = tokenizer.encode_chat(messages)
    engine = saying(tokenizer, prompt, [*tokenizer.encode(" world"), 2], eos=(2,))
    body = answer(engine, tokenizer, "chat", {"messages": messages, "temperature": 0})
    said = len(tokenizer.encode(" world")) + 1
    assert body == {
        "id": "chatcmpl-r",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": " world", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": 2,
            }
        ],
        "usage": {"prompt_tokens": len(prompt), "completion_tokens": said, "total_tokens": len(prompt) + said},
    }


def test_a_completions_first_space_is_kept() -> None:
    tokenizer = small_tokenizer()
    engine = saying(tokenizer, tokenizer.encode("Hello"), [*tokenizer.encode(" world"), 2], eos=(2,))
    body = answer(engine, tokenizer, "completions", {"prompt": "Hello", "temperature": 0})
    assert (body["object"], body["choices"][0]["text"]) == ("text_completion", " world")


def test_choices_are_numbered_prompt_by_prompt_and_prompts_counted_once() -> None:
    tokenizer = small_tokenizer()
    engine = scripted_engine(tokenizer=tokenizer)
    body = answer(
        engine,
        tokenizer,
        "completions",
        {"prompt": [[5, 6, 7], [8]], "n": 2, "max_tokens": 4, "temperature": 1, "ignore_eos": True},
    )
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
    assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 16, "total_tokens": 20}


def test_usage_adds_choices_of_different_length_and_each_has_its_reason() -> None:
    choices = [
        CompletionOutput(index=0, text="a", token_ids=[1] * 60, finish_reason="stop"),
        CompletionOutput(index=1, text="b", token_ids=[1] * 70, finish_reason="stop"),
    ]
    output = RequestOutput("r-0", None, [5, 6], choices, finished=True)
    request = parse_request("chat", {"messages": [{"role": "user", "content": "x"}], "n": 2, "max_tokens": 100})
    body = response_body(request, [output], request_id="r", model="m", created=0, tokenizer=small_tokenizer())
    assert [(c["index"], c["finish_reason"]) for c in body["choices"]] == [(0, "stop"), (1, "stop")]
    assert body["usage"]["completion_tokens"] == 130


def test_two_greedy_choices_are_two_identical_choices() -> None:
    tokenizer = small_tokenizer()
    body = answer(
        scripted_engine(tokenizer=tokenizer),
        tokenizer,
        "completions",
        {"prompt": "Hello", "n": 2, "temperature": 0, "max_tokens": 5, "ignore_eos": True},
    )
    first, second = body["choices"]
    assert (first["index"], second["index"]) == (0, 1)
    assert first["text"] == second["text"]


def test_a_stop_inside_a_token_cuts_the_text_and_counts_the_token() -> None:
    tokenizer = small_tokenizer()
    dots = tokenizer.encode("world...")
    engine = saying(tokenizer, [5], dots)
    body = answer(engine, tokenizer, "completions", {"prompt": [5], "temperature": 0, "stop": "..", "logprobs": 0})
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("world", "stop", "..")
    assert body["usage"]["completion_tokens"] == len(choice["logprobs"]["tokens"])
    assert all(0 <= offset <= len("world") for offset in choice["logprobs"]["text_offset"])


@pytest.mark.parametrize("text", ["ざ!", "Hello world!", "🎉 你好", "a<|im_start|>b"])
@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_the_four_lists_of_logprobs_agree_with_each_other_and_the_text(kind: str, text: str) -> None:
    tokenizer = small_tokenizer(kind)
    said = tokenizer.encode(text, add_special_tokens=False)
    prompt = tokenizer.encode("Hello 世界")
    engine = saying(tokenizer, prompt, said)
    body = {"prompt": "Hello 世界", "echo": True, "logprobs": 2, "temperature": 0, "max_tokens": len(said)}
    choice = answer(engine, tokenizer, "completions", body | {"skip_special_tokens": False})["choices"][0]
    found = choice["logprobs"]
    total = len(prompt) + len(said)
    assert {name: len(values) for name, values in found.items()} == dict.fromkeys(found, total)
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    assert all(value is not None and value <= 0 for value in found["token_logprobs"][1:])
    offsets = found["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[len(prompt)] == len("Hello 世界")
    for token, top in zip(found["tokens"][1:], found["top_logprobs"][1:], strict=True):
        assert token in top
    for place, token in enumerate(found["tokens"]):
        if not token.startswith("bytes:") and kind == "byte-level":
            assert choice["text"].startswith(token, offsets[place])


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_parts_of_a_character_are_told_apart_by_their_bytes(kind: str) -> None:
    tokenizer = small_tokenizer(kind)
    said = tokenizer.encode("ざ🎉", add_special_tokens=False)
    prompt = tokenizer.encode("Hello")
    params = {"logprobs": 20, "temperature": 0, "max_tokens": len(said)}
    choice = answer(saying(tokenizer, prompt, said), tokenizer, "completions", {"prompt": "Hello"} | params)["choices"][
        0
    ]
    found = choice["logprobs"]
    parts = [token for token in found["tokens"] if token.startswith("bytes:")]
    assert len(parts) >= 7
    spelled = b"".join(bytes.fromhex(part.removeprefix("bytes:").replace("\\x", "")) for part in parts)
    assert spelled.decode() == "ざ🎉"
    for token, top in zip(found["tokens"], found["top_logprobs"], strict=True):
        assert len(top) in (20, 21)
        assert token in top


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_the_bytes_of_a_chats_tokens_are_those_of_its_text(kind: str) -> None:
    tokenizer = small_tokenizer(kind)
    text = " Hello ざ🎉 wörld"
    said = tokenizer.encode(text, add_special_tokens=False)
    prompt = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "logprobs": True,
        "temperature": 0,
        "max_tokens": len(said),
    }
    choice = answer(saying(tokenizer, prompt, said), tokenizer, "chat", body)["choices"][0]
    entries = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode().strip() == text.strip()


def test_tokens_that_show_alike_are_all_listed() -> None:
    entry = {5: Logprob(-0.1, 1, "a"), 6: Logprob(-2.0, 2, "a"), 7: Logprob(-3.0, 3, "b")}
    assert _by_text(entry) == {"a": -0.1, "token_id:6": -2.0, "b": -3.0}


def test_scoring_gives_every_token_of_the_prompt_and_nothing_else() -> None:
    tokenizer = small_tokenizer()
    prompt = tokenizer.encode("The capital of France is")
    body = {"prompt": "The capital of France is", "echo": True, "logprobs": 1, "max_tokens": 0}
    choice = answer(scripted_engine(tokenizer=tokenizer), tokenizer, "completions", body)["choices"][0]
    assert choice["text"] == "The capital of France is"
    assert len(choice["logprobs"]["tokens"]) == len(prompt)
    assert choice["logprobs"]["token_logprobs"][0] is None
    more = answer(scripted_engine(tokenizer=tokenizer), tokenizer, "completions", body | {"max_tokens": 1})
    assert len(more["choices"][0]["logprobs"]["tokens"]) == len(prompt) + 1


def test_chat_logprobs_list_exactly_the_most_probable_tokens() -> None:
    tokenizer = small_tokenizer()
    body = {
        "messages": [{"role": "user", "content": "Hello"}],
        "logprobs": True,
        "top_logprobs": 3,
        "temperature": 20,
        "seed": 3,
        "max_tokens": 40,
        "ignore_eos": True,
    }
    choice = answer(scripted_engine(tokenizer=tokenizer), tokenizer, "chat", body)["choices"][0]
    entries = choice["logprobs"]["content"]
    assert len(entries) == 40
    for entry in entries:
        values = [item["logprob"] for item in entry["top_logprobs"]]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert entry["logprob"] <= values[0]
    outside = [e for e in entries if e["token"] not in [item["token"] for item in e["top_logprobs"]]]
    assert outside, "at this temperature some chosen token is not among the top three"
    whole = [e for e in entries if not e["token"].startswith("bytes:")]
    assert whole
    assert all(bytes(e["bytes"]).decode() == e["token"] for e in whole)


def test_prompt_logprobs_stand_beside_the_answer_as_vllm_has_them() -> None:
    tokenizer = small_tokenizer()
    body = {"prompt": [5, 6, 7], "prompt_logprobs": 1, "max_tokens": 1, "temperature": 0}
    choice = answer(scripted_engine(tokenizer=tokenizer), tokenizer, "completions", body)["choices"][0]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert [str(token) in entry for token, entry in zip((6, 7), others, strict=True)] == [True, True]


def test_a_token_that_the_tokenizer_added_takes_no_room_in_the_text() -> None:
    tokenizer = small_tokenizer()
    ids = [0, *tokenizer.encode("Hello")]  # as if a bos were put in front
    offsets = prompt_offsets(ids, "Hello", tokenizer)
    assert offsets[:2] == [0, 0]
    typed = tokenizer.encode("<|endoftext|>Hello")
    assert prompt_offsets(typed, "<|endoftext|>Hello", tokenizer)[:2] == [0, len("<|endoftext|>")]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ContextLengthExceeded("too long", param="prompt"), "invalid_request_error"),
        (ModelMismatch("other model", param="model"), "not_found_error"),
        (StepError("broken"), "server_error"),
    ],
)
def test_errors_have_openais_shape(error: Any, kind: str) -> None:
    assert error_body(error) == {
        "error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    }
