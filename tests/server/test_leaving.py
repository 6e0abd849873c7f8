"""Clients that leave, streaming or not, queued or running: their places and blocks are free within two steps."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import time
from typing import Any

import httpx2
import pytest

from packhorse.engine.engine import Engine
from tests.jobs.scripted import byte_tokenizer, cheap
from tests.support.engines import runner_of, scripted_engine
from tests.support.servers import PATIENCE, ScriptedServer, connect, metric_of, until

LONG = {"prompt": "a" * 40, "max_tokens": 3000, "ignore_eos": True, "temperature": 0}


def engine(seconds: float = 0.002, **settings: Any) -> Engine:
    """One whose steps take a while, so that a client can leave in the middle; on the real clock."""
    tokenizer = byte_tokenizer()
    options: dict[str, Any] = {"num_blocks": 2048, "clock": time.monotonic} | settings
    made = scripted_engine(cheap(tokenizer.vocab_size), tokenizer=tokenizer, **options)
    runner = runner_of(made)
    runner.keep_batches = False
    runner._before_step = lambda _: time.sleep(seconds)
    return made


def serving(made: Engine, **settings: Any) -> ScriptedServer:
    return ScriptedServer(made, byte_tokenizer(), **settings)


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_while_running_is_gone_within_two_steps(stream: bool) -> None:
    made = engine(seconds=0.05)
    with serving(made) as server:
        connection = connect(server.port, LONG | {"stream": stream})
        until(lambda: made.stats().generated_tokens > 2)
        connection.close()
        steps = made.stats().steps
        until(lambda: server.model.engine.stats().num_running == 0)
        # One may be under way when the connection closes, and the news of it takes a moment.
        assert server.model.engine.stats().steps - steps <= 2
        server.assert_idle()
        until(lambda: metric_of(server.url, 'request_success_total{finished_reason="abort"') == 1)
        assert metric_of(server.url, "aborted_tokens_total") > 0
        assert metric_of(server.url, 'http_requests_total{outcome="left"') == 1


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_during_a_long_prefill_is_gone_too(stream: bool) -> None:
    made = engine(seconds=0.03, max_num_batched_tokens=16)
    with serving(made) as server:
        connection = connect(server.port, LONG | {"prompt": "b" * 2000, "stream": stream})
        until(lambda: made.stats().computed_tokens > 32)
        connection.close()
        steps = made.stats().steps
        until(lambda: server.model.engine.stats().num_running == 0)
        assert server.model.engine.stats().steps - steps <= 2
        assert made.stats().generated_tokens == 0
        server.assert_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_the_queue_is_never_run(stream: bool) -> None:
    made = engine(max_num_seqs=1)
    with serving(made) as server:
        first = connect(server.port, LONG)
        until(lambda: server.model.engine.stats().num_running == 1)
        second = connect(server.port, LONG | {"stream": stream})
        until(lambda: server.model.engine.stats().num_waiting == 1)
        second.close()
        until(lambda: server.model.engine.stats().num_waiting == 0)
        assert server.model.engine.stats().num_running == 1
        assert made.stats().prompt_tokens == 80
        first.close()
        until(lambda: server.model.engine.stats().num_running == 0)
        assert made.stats().computed_tokens < 40 + made.stats().generated_tokens + 1
        server.assert_idle()


def test_one_of_several_prompts_does_not_stay_when_the_client_leaves() -> None:
    made = engine()
    with serving(made) as server:
        connection = connect(
            server.port, LONG | {"prompt": ["aa", "bb", "cc"], "n": 2, "temperature": 1, "stream": True}
        )
        until(lambda: server.model.engine.stats().num_running == 6)
        connection.close()
        until(lambda: server.model.engine.stats().num_running == 0)
        server.assert_idle()


def test_a_reader_that_takes_nothing_is_ended_and_holds_up_nobody() -> None:
    made = engine(seconds=0.0)
    with serving(made, max_unread=64) as server:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.connect(("127.0.0.1", server.port))
        # Much more than the buffers of both kernels hold.
        body = json.dumps(LONG | {"n": 16, "temperature": 1, "logprobs": 5, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n"
        slow.sendall(head.encode() + body)
        until(lambda: server.model.engine.stats().num_running == 16)
        quick = httpx2.post(f"{server.url}/v1/completions", json={"prompt": "q", "max_tokens": 50}, timeout=PATIENCE)
        assert quick.status_code == 200
        until(lambda: server.model.engine.stats().num_running == 0)
        assert made.stats().generated_tokens < 16 * 3000
        assert made.stats().finished["abort"] == 1
        server.assert_idle()
        slow.close()
        until(lambda: metric_of(server.url, 'http_requests_total{outcome="left"') == 1)


@pytest.mark.slow
def test_a_storm_of_a_thousand_requests_of_which_half_leave_at_random() -> None:
    made = engine(seconds=0.001, max_num_seqs=32)
    rng = random.Random(3)
    answers: list[int] = []

    async def client(server: ScriptedServer, number: int) -> None:
        stays, stream = number % 2 == 0, rng.random() < 0.5
        body = {"prompt": f"{number} " * rng.randint(1, 20), "max_tokens": rng.randint(1, 80), "stream": stream}
        data = json.dumps(body).encode()
        await asyncio.sleep(rng.random() * 6)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(data)
        )
        writer.write(data)
        if stays:
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 200")
            assert b"[DONE]" in answer if stream else b'"usage"' in answer
            answers.append(number)
        else:
            await asyncio.sleep(rng.random() * 0.5)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def storm(server: ScriptedServer) -> None:
        await asyncio.gather(*(client(server, number) for number in range(1000)))

    with serving(made, max_waiting=1000) as server:
        asyncio.run(asyncio.wait_for(storm(server), 120))
        until(lambda: server.model.engine.stats().num_running + server.model.engine.stats().num_waiting == 0)
        server.assert_idle()
        assert len(answers) == 500
        stats = made.stats()
        assert stats.finished["abort"] > 100
        assert sum(stats.finished.values()) <= 1000
        assert stats.finished.get("error", 0) == 0
        assert not server.service.text_threads._work_queue.qsize()
