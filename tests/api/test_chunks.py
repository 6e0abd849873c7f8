"""Chunks of a stream: joined, they are the body that the same request has without streaming."""

from __future__ import annotations

import random
from typing import Any

import pytest

from packhorse.api.chunks import Chunks
from packhorse.api.requests import engine_requests, parse_request, tokenize
from packhorse.api.responses import response_body
from packhorse.engine.engine import Engine
from packhorse.text.tokenizer import Tokenizer
from tests.support.chunks import joined_chunks
from tests.support.engines import finish_all, scripted_engine
from tests.support.scripted import scripts
from tests.support.tokenizers import small_tokenizer

MESSAGES = [{"role": "user", "content": "Hello"}]
KEPT = {"request_id": "r", "model": "m", "created": 1_700_000_000}


def chunks_of(engine: Engine, tokenizer: Tokenizer, endpoint: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Every chunk of the body's stream, the usage last when it is asked for."""
    request = parse_request(endpoint, body | {"stream": True}, allow_stream=True)
    made = engine_requests(request, tokenize(request, tokenizer), "r")
    place_of = {one.request_id: place for place, one in enumerate(made)}
    for one in made:
        engine.submit(one)
    chunks = Chunks(request, tokenizer=tokenizer, **KEPT)
    found = []
    while engine.num_unfinished:
        for output in engine.step():
            found += chunks.of(place_of[output.request_id], output)
    return [*found, chunks.usage()] if request.include_usage else found


def whole_body(engine: Engine, tokenizer: Tokenizer, endpoint: Any, body: dict[str, Any]) -> dict[str, Any]:
    request = parse_request(endpoint, body)
    made = engine_requests(request, tokenize(request, tokenizer), "r")
    for one in made:
        engine.submit(one)
    outputs = finish_all(engine)
    return response_body(request, [outputs[one.request_id] for one in made], tokenizer=tokenizer, **KEPT)


def random_body(rng: random.Random, endpoint: str) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": rng.choice([1, 3, 12, 40]), "temperature": rng.choice([0, 0, 1.0, 8.0])}
    body["seed"] = rng.randrange(1 << 30)
    offers: dict[str, Any] = {
        "n": rng.choice([2, 3]),
        "stop": rng.sample(["a", "e", "th", "你", " ", "\ufffd"], 2),
        "min_tokens": 1,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "prompt_logprobs": rng.choice([0, 2]),
        "ignore_eos": True,
    }
    if endpoint == "chat":
        offers |= {"logprobs": True}
    else:
        offers |= {"logprobs": rng.choice([0, 3]), "echo": True}
    chosen = {name: offers[name] for name in rng.sample(sorted(offers), rng.choice([0, 1, 2, 4, 6]))}
    if chosen.get("logprobs") is True and rng.random() < 0.7:
        chosen["top_logprobs"] = rng.choice([0, 3])
    if endpoint == "chat":
        return body | chosen | {"messages": MESSAGES}
    return body | chosen | {"prompt": rng.choice(["Hello world", ["Hello", "né 你好"], [5, 6, 7]])}


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
@pytest.mark.parametrize("seed", range(40))
def test_joined_chunks_are_the_body_without_streaming(endpoint: Any, kind: str, seed: int) -> None:
    tokenizer = small_tokenizer(kind)
    rng = random.Random(f"{endpoint}{kind}{seed}")
    body = random_body(rng, endpoint)
    eos = tuple(tokenizer.encode("<|im_end|>")[-1:])
    whole = whole_body(scripted_engine(tokenizer=tokenizer, eos=eos), tokenizer, endpoint, body)
    asked = body | {"stream_options": {"include_usage": True}}
    chunks = chunks_of(scripted_engine(tokenizer=tokenizer, eos=eos), tokenizer, endpoint, asked)
    assert joined_chunks(chunks) == whole


def saying(text: str) -> tuple[Engine, Tokenizer]:
    tokenizer = small_tokenizer()
    ids = [token for character in text for token in tokenizer.encode(character)]
    engine = scripted_engine(scripts({tuple(tokenizer.encode("Hello")): [*ids, 2]}), tokenizer=tokenizer, eos=(2,))
    return engine, tokenizer


def test_a_chunk_without_anything_to_show_is_not_sent() -> None:
    engine, tokenizer = saying("a STOP")
    chunks = chunks_of(engine, tokenizer, "completions", {"prompt": "Hello", "stop": "STOP", "temperature": 0})
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", " ", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
    assert chunks[-1]["choices"][0]["stop_reason"] == "STOP"


def test_tokens_that_a_stop_string_keeps_back_come_with_their_text() -> None:
    engine, tokenizer = saying("a STO.")
    body = {"prompt": "Hello", "stop": "STOP", "temperature": 0, "logprobs": 0}
    chunks = chunks_of(engine, tokenizer, "completions", body)
    shown = [(c["choices"][0]["text"], c["choices"][0]["logprobs"]["tokens"]) for c in chunks]
    assert shown[:4] == [("a", ["a"]), (" ", [" "]), ("", ["S"]), ("STO.", ["T", "O", "."])]


def test_usage_is_a_field_of_every_chunk_only_when_it_is_asked_for() -> None:
    engine, tokenizer = saying("abc")
    body = {"prompt": "Hello", "temperature": 0}
    assert all("usage" not in chunk for chunk in chunks_of(engine, tokenizer, "completions", body))
    asked = body | {"stream_options": {"include_usage": True}}
    *chunks, last = chunks_of(saying("abc")[0], tokenizer, "completions", asked)
    assert all(chunk["usage"] is None for chunk in chunks)
    count = len(tokenizer.encode("Hello"))
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": count, "completion_tokens": 4, "total_tokens": count + 4}
