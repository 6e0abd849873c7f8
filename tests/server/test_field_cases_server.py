"""Field cases of servers: usage, unknown fields, errors, overload, health, huge bodies, priorities."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from packhorse.engine.engine import Engine
from tests.jobs.scripted import byte_tokenizer, cheap
from tests.support.engines import runner_of, scripted_engine
from tests.support.scripted import FakeClock
from tests.support.servers import (
    PATIENCE,
    ScriptedServer,
    connect,
    events_of,
    lines_of,
    metric_of,
    until,
)

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "temperature": 0}
TEXT = {"prompt": "ab", "max_tokens": 5, "temperature": 0}


def engine(**settings: Any) -> Engine:
    tokenizer = byte_tokenizer()
    options: dict[str, Any] = {"num_blocks": 1024, "clock": time.monotonic} | settings
    return scripted_engine(cheap(tokenizer.vocab_size), tokenizer=tokenizer, **options)


def serving(made: Engine | None = None, **settings: Any) -> ScriptedServer:
    return ScriptedServer(made or engine(), byte_tokenizer(), **settings)


def post(server: ScriptedServer, body: Any = None, path: str = "/v1/completions", **options: Any) -> httpx2.Response:
    content = {"json": body} if body is not None else {}
    return httpx2.post(f"{server.url}{path}", **content, timeout=PATIENCE, **options)


class Gate:
    """Holds the steps of an engine's runner."""

    def __init__(self, made: Engine) -> None:
        self.at_gate = threading.Event()
        self._open = threading.Event()
        runner_of(made)._before_step = self._hold

    def _hold(self, _: int) -> None:
        self.at_gate.set()
        assert self._open.wait(PATIENCE)

    def open(self) -> None:
        self._open.set()


@contextmanager
def asking(server: ScriptedServer, *bodies: dict[str, Any]) -> Iterator[list[Any]]:
    """The futures of requests that are on their way."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        yield [pool.submit(post, server, body) for body in bodies]


# C03


def test_c03_usage_comes_last_and_only_when_asked() -> None:
    with serving() as server:
        plain = events_of(post(server, TEXT | {"stream": True}))
        assert all("usage" not in event for event in plain)
        unasked = events_of(post(server, TEXT | {"stream": True, "stream_options": {"include_usage": False}}))
        assert all("usage" not in event for event in unasked)
        asked = {"stream": True, "stream_options": {"include_usage": True}, "n": 2, "temperature": 1}
        *chunks, last = events_of(post(server, TEXT | asked))
        assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
        assert last["choices"] == []
        assert last["usage"] == {"prompt_tokens": 2, "completion_tokens": 10, "total_tokens": 12}
        without = post(server, TEXT | {"stream_options": {"include_usage": True}})
        assert (without.status_code, without.json()["error"]["param"]) == (400, "stream_options")


# C04


def test_c04_unknown_fields_are_named_in_a_header_or_refused() -> None:
    body = CHAT | {"max_completion_token": 9, "messages": [{"role": "user", "content": "Hi", "mood": "good"}]}
    with serving() as server:
        answer = post(server, body, "/v1/chat/completions")
        assert answer.status_code == 200
        assert answer.headers["x-packhorse-ignored-fields"] == "max_completion_token, messages[0].mood"
        streamed = post(server, body | {"stream": True, "é\n": 1}, "/v1/chat/completions")
        assert streamed.headers["x-packhorse-ignored-fields"].startswith("max_completion_token, \\xe9?")
    with serving(strict_fields=True) as server:
        refused = post(server, body, "/v1/chat/completions")
        assert refused.status_code == 400
        assert "did you mean max_completion_tokens?" in refused.json()["error"]["message"]


# C06


@pytest.mark.parametrize(
    ("request_options", "status", "code"),
    [
        ({"content": b"{"}, 400, "invalid_json"),
        ({"content": b'{"prompt": NaN}'}, 400, "invalid_json"),
        ({"content": b'{"prompt": "\\ud800"}'}, 400, "invalid_json"),
        ({"content": b"\xff"}, 400, "invalid_json"),
        ({"content": b""}, 400, "invalid_json"),
        ({"json": [1]}, 400, "invalid_request"),
        ({"json": {"prompt": 5}}, 400, "invalid_request"),
        ({"json": {}}, 400, "missing_parameter"),
        ({"json": {"prompt": "a", "model": "gpt-9"}}, 404, "model_mismatch"),
        ({"json": {"prompt": "a" * 5000}}, 400, "context_length_exceeded"),
        ({"data": {"prompt": "a"}}, 415, "unsupported_media_type"),
        ({"content": b"a", "headers": {"content-type": "text/plain"}}, 415, "unsupported_media_type"),
    ],
)
def test_c06_every_error_has_openais_shape(request_options: dict[str, Any], status: int, code: str) -> None:
    with serving() as server:
        for path in ("/v1/completions",):
            response = httpx2.post(f"{server.url}{path}", **request_options)
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (status, code)
            assert set(error) == {"message", "type", "param", "code"}
            assert "Traceback" not in response.text


def test_c06_routes_and_methods_that_are_not_served_have_it_too() -> None:
    with serving() as server:
        for method, path, status in (
            ("GET", "/v1/nothing", 404),
            ("GET", "/", 404),
            ("GET", "/v1/completions", 405),
            ("DELETE", "/v1/models", 405),
            ("POST", "/health/live", 405),
            ("POST", "/v1/completions/", 404),
        ):
            response = httpx2.request(method, f"{server.url}{path}")
            assert (response.status_code, set(response.json()["error"])) == (
                status,
                {"message", "type", "param", "code"},
            )


def test_c06_a_step_that_raises_is_a_500_and_the_next_request_is_served() -> None:
    made = engine()
    runner = runner_of(made)

    def fail(_: int) -> None:
        raise RuntimeError("the model is broken")

    with serving(made) as server:
        runner._before_step = fail
        response = post(server, TEXT)
        assert (response.status_code, response.json()["error"]["code"]) == (500, "step_failed")
        assert post(server, TEXT | {"stream": True}).status_code == 500, "nothing was sent yet"
        runner._before_step = lambda step: fail(0) if step % 7 == 6 else None
        lines = lines_of(post(server, TEXT | {"stream": True, "max_tokens": 100}))
        assert '"code":"step_failed"' in lines[-1]
        assert all('"finish_reason":null' in line for line in lines[:-1])
        runner._before_step = None
        assert post(server, TEXT).status_code == 200
        server.assert_idle()


# C09


def test_c09_of_twenty_clients_six_are_taken_in_and_the_rest_is_refused_at_once() -> None:
    made = engine(max_num_seqs=2)
    gate = Gate(made)
    with serving(made, max_waiting=4) as server, ThreadPoolExecutor(20) as pool:
        first = [pool.submit(post, server, TEXT) for _ in range(2)]
        gate.at_gate.wait(PATIENCE)
        until(lambda: made.num_unfinished + len(server.model.engine._arrivals) + server.model.engine._queued >= 2)
        others = [pool.submit(post, server, TEXT) for _ in range(18)]
        until(lambda: sum(request.done() for request in others) >= 12)
        assert httpx2.get(f"{server.url}/health/ready").status_code == 200
        gate.open()
        answers = [request.result() for request in [*first, *others]]
        refused = [answer for answer in answers if answer.status_code != 200]
        assert len(answers) - len(refused) == 6
        assert {answer.status_code for answer in refused} == {429}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        assert {answer.json()["error"]["code"] for answer in refused} == {"queue_full"}
        assert metric_of(server.url, 'requests_rejected_total{reason="queue_full"') == len(refused)
        server.assert_idle()


def test_c09_choices_count_each_and_a_client_that_leaves_makes_room() -> None:
    made = engine(max_num_seqs=1)
    with serving(made, max_waiting=3) as server, ThreadPoolExecutor(1) as pool:
        stats = server.model.engine.stats
        first = connect(server.port, TEXT | {"max_tokens": 4000, "ignore_eos": True})
        until(lambda: stats().num_running == 1)
        three = connect(server.port, TEXT | {"n": 3, "temperature": 1, "stream": True})
        until(lambda: stats().num_waiting == 3)
        assert post(server, TEXT).status_code == 429
        three.close()
        until(lambda: stats().num_waiting == 0)
        last = pool.submit(post, server, TEXT)
        until(lambda: stats().num_waiting == 1)
        first.close()
        assert last.result().status_code == 200
        server.assert_idle()


# C10


def test_c10_a_server_that_loads_is_live_and_not_ready() -> None:
    with serving(loaded=False) as server:
        assert httpx2.get(f"{server.url}/health/live").status_code == 200
        ready = httpx2.get(f"{server.url}/health/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "loading"})
        for response in (httpx2.get(f"{server.url}/v1/models"), post(server, TEXT)):
            assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
            assert response.headers["retry-after"] == "1"
        assert httpx2.get(f"{server.url}/metrics").status_code == 200
        server.service.model = server.model
        assert httpx2.get(f"{server.url}/health/ready").json() == {"status": "ready"}
        assert post(server, TEXT).status_code == 200


def test_c10_a_hanging_step_turns_readiness_off_until_it_ends() -> None:
    made = engine()
    gate = Gate(made)
    with serving(made, watchdog_seconds=0.2) as server, asking(server, TEXT) as [request]:
        until(lambda: httpx2.get(f"{server.url}/health/ready").json()["status"] == "stuck")
        assert httpx2.get(f"{server.url}/health/live").status_code == 200
        gate.open()
        assert request.result().status_code == 200
        until(lambda: httpx2.get(f"{server.url}/health/ready").status_code == 200)


def test_c10_a_dead_engine_is_not_ready_and_nobody_waits_for_it() -> None:
    made = engine()

    def die() -> list[Any]:
        raise SystemExit("gone")

    with serving(made) as server:
        made.step = die  # type: ignore[method-assign]
        assert post(server, TEXT).status_code == 500
        assert post(server, TEXT).status_code == 500
        assert httpx2.get(f"{server.url}/health/ready").json() == {"status": "stuck"}


# C11


def chunked(size: int) -> Iterator[bytes]:
    for _ in range(size >> 16):
        yield b"a" * (1 << 16)


def test_c11_a_body_that_is_too_large_is_refused_early_however_it_is_sent() -> None:
    with serving(max_body_bytes=1 << 20) as server:
        for content in (b"a" * (64 << 20), chunked(64 << 20)):
            try:
                response = post(server, content=content, headers={"content-type": "application/json"})
            except httpx2.TransportError:
                continue  # the server need not read what it has refused
            assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
        begin = (
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
            b"content-length: 67108864\r\n\r\n{"
        )
        answer = asyncio.run(sent(server.port, begin))
        assert answer.startswith(b"HTTP/1.1 413")
        assert post(server, TEXT).status_code == 200


async def sent(port: int, data: bytes) -> bytes:
    """What comes back when only that much of a request is sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    answer = await asyncio.wait_for(reader.read(12), PATIENCE)
    writer.close()
    return answer


# C15


def test_c15_the_urgent_goes_first_and_the_patient_is_not_forgotten() -> None:
    clock = FakeClock()
    made = engine(max_num_seqs=1, priority_seconds=1.0, clock=clock)
    ended: list[str] = []

    def ask(server: ScriptedServer, name: str, priority: int) -> None:
        assert post(server, TEXT | {"priority": priority}).status_code == 200
        ended.append(name)

    with serving(made) as server, ThreadPoolExecutor(4) as pool:
        first = connect(server.port, TEXT | {"max_tokens": 4000, "ignore_eos": True})
        until(lambda: server.model.engine.stats().num_running == 1)
        asked = []
        for waiting, (name, priority) in enumerate([("low", 2), ("middle", 1), ("high", 0), ("late and high", 0)]):
            if name == "late and high":
                clock.advance(2.5)  # makes up for two steps of priority
            asked.append(pool.submit(ask, server, name, priority))
            until(lambda waiting=waiting: server.model.engine.stats().num_waiting == waiting + 1)
        first.close()
        for one in asked:
            one.result()
    assert ended == ["high", "middle", "low", "late and high"]


def test_c15_a_priority_that_cannot_be_is_refused() -> None:
    with serving() as server:
        for bad in (1.5, "high", 10**9, True):
            response = post(server, TEXT | {"priority": bad})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "priority")
