"""How a server process begins and ends: signals, drains, exit codes, and what it says when it cannot start."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.servers import PATIENCE, ServerProcess, events_of, lines_of, until

pytestmark = pytest.mark.slow

MODEL = "smollm2-135m-instruct"


def body(max_tokens: int, **more: Any) -> dict[str, Any]:
    return {"prompt": "Once upon a time", "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0} | more


def post(server: ServerProcess, content: dict[str, Any]) -> httpx2.Response:
    return httpx2.post(f"{server.url}/v1/completions", json=content, timeout=60)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as made:
        yield made


def running(server: ServerProcess, pool: ThreadPoolExecutor, *bodies: dict[str, Any]) -> list[Future[httpx2.Response]]:
    """Requests that the engine has, in this order, the last of them in its queue if there is no place."""
    asked: list[Future[httpx2.Response]] = []
    for one in bodies:
        asked.append(pool.submit(post, server, one))
        until(lambda: len(asked) == server.metric("num_requests_running") + server.metric("num_requests_waiting"))
    return asked


def test_c16_a_signal_lets_all_that_was_taken_in_finish_and_takes_nothing_new(pool: ThreadPoolExecutor) -> None:
    with ServerProcess(MODEL, "--num-blocks", "256", "--max-num-seqs", "2", "--log-prompts") as server:
        asked = running(server, pool, body(160, stream=True), body(100), body(8, stream=True), body(8))
        server.process.send_signal(signal.SIGTERM)
        until(lambda: httpx2.get(f"{server.url}/health/ready").status_code == 503)
        assert httpx2.get(f"{server.url}/health/ready").json() == {"status": "draining"}
        assert httpx2.get(f"{server.url}/health/live").status_code == 200
        refused = post(server, body(1))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert refused.headers["retry-after"]
        streamed, whole, queued_stream, queued = [one.result() for one in asked]
        assert events_of(streamed)[-1]["choices"][0]["finish_reason"] == "length"
        assert events_of(queued_stream)[-1]["choices"][0]["finish_reason"] == "length"
        assert [answer.json()["usage"]["completion_tokens"] for answer in (whole, queued)] == [100, 8]
        assert server.process.wait(PATIENCE) == 0
        assert '"clean":true' in server.log()


def test_c16_what_outlasts_the_drain_ends_with_an_error(pool: ThreadPoolExecutor) -> None:
    options = ["--num-blocks", "1024", "--max-num-seqs", "2", "--drain-timeout", "1"]
    with ServerProcess(MODEL, *options) as server:
        asked = running(server, pool, body(5000, stream=True), body(5000), body(5000, stream=True))
        server.process.send_signal(signal.SIGTERM)
        streamed, whole, queued = [one.result() for one in asked]
        *lines, last = lines_of(streamed)
        assert '"code":"draining"' in last
        assert lines
        assert all('"finish_reason":null' in line for line in lines)
        for answer in (whole, queued):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        assert server.process.wait(PATIENCE) == 1
        assert '"clean":false' in server.log()


def test_c16_a_second_signal_does_not_wait(pool: ThreadPoolExecutor) -> None:
    with ServerProcess(MODEL, "--num-blocks", "1024", "--drain-timeout", "600") as server:
        [asked] = running(server, pool, body(5000, stream=True))
        server.process.send_signal(signal.SIGTERM)
        until(lambda: httpx2.get(f"{server.url}/health/ready").status_code == 503)
        server.process.send_signal(signal.SIGINT)
        assert '"code":"draining"' in lines_of(asked.result())[-1]
        assert server.process.wait(PATIENCE) == 1


def test_an_idle_server_ends_at_once() -> None:
    with ServerProcess(MODEL, "--num-blocks", "64") as server:
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(PATIENCE) == 0


def start(*options: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "packhorse", "serve", *options]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=os.environ | (env or {}))


def failure(*options: str) -> str:
    """What a server that cannot start says, in one line."""
    process = start(*options)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "Traceback" not in said
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    return errors[0]


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port} cannot be listened to" in failure(MODEL, "--port", str(port))
    assert "cannot be listened to" in failure(MODEL, "--host", "no.such.host.invalid")


def test_a_model_or_a_file_of_keys_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "nothing-here" in failure("./nothing-here", "--port", "0")
    assert "keys.txt cannot be read" in failure(MODEL, "--port", "0", "--api-key-file", str(tmp_path / "keys.txt"))
    (tmp_path / "keys.txt").write_text("\n \n")
    assert "keys.txt holds no key" in failure(MODEL, "--port", "0", "--api-key-file", str(tmp_path / "keys.txt"))
    assert "Which model?" in failure("--port", "0", "--config", os.devnull)
    assert "max_waiting is -1" in failure(MODEL, "--max-waiting", "-1")


def test_a_signal_while_it_loads_ends_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = start(MODEL, "--port", str(port))
    url = f"http://127.0.0.1:{port}/health/ready"

    def loading() -> bool:
        try:
            return httpx2.get(url).json() == {"status": "loading"}
        except httpx2.TransportError:
            return False

    until(loading)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM
