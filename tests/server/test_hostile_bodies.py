"""Bodies that are no requests, by the thousand and by the megabyte: never a 5xx, and the server stays awake."""

from __future__ import annotations

import json
import multiprocessing
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import httpx2
import pytest

from tests.support.servers import ServerProcess

pytestmark = pytest.mark.slow

COUNT = 5_000
LIMIT = 16 << 20
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def large() -> Iterator[ServerProcess]:
    with ServerProcess("smollm2-135m-instruct", "--num-blocks", "64", "--max-body-bytes", str(LIMIT)) as running:
        yield running


def beat(url: str, pipe: Connection) -> None:
    """Ask for /health/live all the time until told to stop; then say how often, and how long the slowest took."""
    slowest, count = 0.0, 0
    with httpx2.Client() as client:
        while not pipe.poll():
            begin = time.perf_counter()
            assert client.get(f"{url}/health/live").status_code == 200
            slowest = max(slowest, time.perf_counter() - begin)
            count += 1
            if count == 1:
                pipe.send("beating")
    pipe.send((count, slowest))


@contextmanager
def awake(server: ServerProcess, least: int) -> Iterator[None]:
    """Checks from another process that health answers within 100 ms all the while."""
    ours, theirs = multiprocessing.Pipe()
    pulse = multiprocessing.get_context("spawn").Process(target=beat, args=(server.url, theirs))
    pulse.start()
    assert ours.recv() == "beating"
    yield
    ours.send("stop")
    count, slowest = ours.recv()
    pulse.join()
    assert count >= least
    assert slowest < 0.1


VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 10**18, 2**63, 2**64, 10**30, 1e308, -0.5, "", "a", "é" * 100, "x" * 20_000,
    [], [None], [[]], [[[[]]]], {}, {"a": 1}, {"type": "text"}, [{"role": 1}], [1, "a"], ["a", 1], [10**9], [-1],
]  # fmt: skip
NAMES = [
    "prompt", "messages", "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "n",
    "stop", "stop_token_ids", "seed", "logprobs", "top_logprobs", "prompt_logprobs", "echo", "logit_bias", "stream",
    "stream_options", "priority", "timeout", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "min_tokens", "ignore_eos", "tools", "tool_choice", "response_format", "user", "suffix", "metadata", "é", "",
]  # fmt: skip
RAW = [
    b"", b" ", b"{", b"}", b"[", b'"', b"null", b"NaN", b"{]", b'{"a":}', b'{"prompt": "a",}', b"{'prompt': 'a'}",
    b"\xff\xfe", b"\xef\xbb\xbf{}", b"{}{}", b'{"prompt": "\\ud800"}', b'{"prompt": "\\udc00\\ud800"}',
    b'{"prompt": "\xed\xa0\x80"}', b'{"prompt": NaN}', b'{"temperature": Infinity}', b'{"seed": 1e999}',
    b'{"max_tokens": ' + b"9" * 5000 + b"}", b"[" * 5000, b'{"a":' * 2000, b"[" * 900 + b"]" * 900,
    b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}", b'{"prompt": "a", "prompt": 5}', b"\x00", b'{"prompt": "a\x00"}',
]  # fmt: skip


def wrong(rng: random.Random) -> bytes:
    """A body that is broken, or whose fields are of any kind; a few are requests by chance, small ones."""
    if rng.random() < 0.3:
        return rng.choice(RAW)
    body = {name: rng.choice(VALUES) for name in rng.sample(NAMES, rng.randint(1, 6))}
    if rng.random() < 0.5:
        body = {"prompt": "a", "max_tokens": 1} | body
    if body.get("max_tokens") not in (0, 1, None) or body.get("n") not in (1, None):
        body["max_tokens"], body["n"] = rng.choice([-1, "a", 1.5, None, []]), rng.choice([0, -1, "a", 1.5, []])
    if body.get("messages") and not body.get("max_tokens"):
        body["max_tokens"] = 1
    data = json.dumps(body).encode()
    if rng.random() < 0.2:
        cut = rng.randrange(len(data))
        data = data[:cut] + rng.choice([b"", b"\xff", b"{", b'"']) + data[cut + rng.randint(0, 2) :]
    return data


def test_five_thousand_bodies_get_no_5xx_and_errors_of_one_shape(large: ServerProcess) -> None:
    rng = random.Random(11)
    statuses: dict[int, int] = {}
    paths = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
    with awake(large, least=100), httpx2.Client(base_url=large.url, timeout=60) as client:
        for _ in range(COUNT):
            body = wrong(rng)
            response = client.post(rng.choice(paths), content=body, headers=JSON)
            statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
            assert response.status_code < 500, body
            if response.status_code != 200:
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert sum(statuses.values()) == COUNT
    assert statuses.get(400, 0) > COUNT * 0.8
    assert large.metric("num_requests_running") == large.metric("num_requests_waiting") == 0


def test_c11_health_answers_while_huge_bodies_are_read(large: ServerProcess) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}] * 50_000, "max_tokens": 1}
    bodies = [
        ("/v1/completions", json.dumps({"prompt": "word " * 1_600_000}).encode(), "context_length_exceeded"),
        ("/v1/completions", json.dumps({"prompt": list(range(1000)) * 400}).encode(), "context_length_exceeded"),
        ("/v1/completions", b"[" * 100_000, "invalid_json"),
        ("/v1/chat/completions", json.dumps(chat).encode(), "context_length_exceeded"),
        ("/v1/completions", b"{" * (LIMIT + 1), "body_too_large"),
    ]
    before = large.memory()
    with awake(large, least=20), httpx2.Client(base_url=large.url, timeout=60) as client:
        for path, body, code in bodies:
            assert client.post(path, content=body, headers=JSON).json()["error"]["code"] == code
        answer = client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 1})
        assert answer.status_code == 200
    assert large.memory() < before + (300 << 20)
