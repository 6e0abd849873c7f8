"""Real servers on real sockets: `packhorse serve` in a process of its own, or over a scripted engine in a thread."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx2
import psutil
import uvicorn
import uvloop

from packhorse.config import ServerConfig
from packhorse.engine.async_engine import AsyncEngine
from packhorse.engine.engine import Engine
from packhorse.server.app import make_app
from packhorse.server.metrics import Metrics
from packhorse.server.process import Server, listen
from packhorse.server.service import ServedModel, Service
from packhorse.text.tokenizer import Tokenizer

PATIENCE = 20.0
"""Seconds after which a test that waits for something fails. None waits that long when all is well."""


def metric_of(url: str, name: str) -> float:
    """What /metrics says of a name (without the prefix; labels may follow in braces)."""
    text = httpx2.get(f"{url}/metrics").text
    [line] = [line for line in text.splitlines() if line.split(" ")[0].startswith(f"packhorse:{name}")][:1]
    return float(line.rsplit(" ", 1)[1])


def events_of(response: httpx2.Response) -> list[dict[str, Any]]:
    """The events of a stream that ended well; the end marker is the last line and is left out."""
    *events, end = lines_of(response)
    assert end == "[DONE]"
    return [json.loads(event) for event in events]


def lines_of(response: httpx2.Response) -> list[str]:
    """What each event of a stream holds, the end marker too, if it is there."""
    assert response.headers["content-type"].startswith("text/event-stream")
    found = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in found)
    return [line.removeprefix("data: ") for line in found]


def until(condition: Callable[[], bool]) -> None:
    """Until other threads and processes have brought it about."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.0005)  # lets them run; the condition alone decides


def connect(port: int, body: dict[str, Any], path: str = "/v1/completions") -> socket.socket:
    """A connection on which the request has been sent, to be closed whenever the test likes."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
    connection.sendall(head.encode() + data)
    return connection


class ServerProcess:
    """`packhorse serve MODEL …` on a free port of 127.0.0.1, from where it is entered to where it is left."""

    def __init__(self, model: str, *options: str, env: dict[str, str] | None = None) -> None:
        self._command = [sys.executable, "-m", "packhorse", "serve", model, "--port", "0", *options]
        self._env = env
        self.url = ""

    def __enter__(self) -> ServerProcess:
        self._log = tempfile.NamedTemporaryFile(prefix="packhorse-log-", suffix=".jsonl")
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=self._log, text=True, env=self._env
        )
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        found = re.search(r"http://\S+", said)
        assert found, f"the server said {said!r} and logged: {self.log()}"
        self.url = found[0]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
            self.process.communicate()
            self._log.close()

    def log(self) -> str:
        """All that was logged so far."""
        return Path(self._log.name).read_text("utf-8")

    def metric(self, name: str) -> float:
        """The value of one of the server's metrics, of the first line that has its name and these labels."""
        return metric_of(self.url, name)

    def memory(self) -> int:
        """Bytes that are resident."""
        return int(psutil.Process(self.process.pid).memory_info().rss)


class ScriptedServer:
    """The server's application over an AsyncEngine, in a thread of this process, from where it is entered on.

    engine: not yet started. loaded: whether the model is there from the beginning.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, *, loaded: bool = True, **settings: Any) -> None:
        self.settings = ServerConfig(port=0, **settings)
        self.engine = engine
        served = AsyncEngine(
            engine,
            max_waiting=self.settings.max_waiting,
            max_unread=self.settings.max_unread,
            watchdog_seconds=self.settings.watchdog_seconds,
            clock=engine._clock,
        )
        self.model = ServedModel(
            names=self.settings.served_model_name or ("scripted",),
            tokenizer=tokenizer,
            engine=served,
            max_model_len=engine.max_model_len,
            created=1_700_000_000,
        )
        self.service = Service(self.settings, self.model if loaded else None)
        self.metrics = Metrics(self.service)
        config = uvicorn.Config(
            make_app(self.service, self.metrics), log_config=None, access_log=False, lifespan="off", loop="uvloop"
        )
        self._server = Server(config)
        self._thread = threading.Thread(target=self._run, name="scripted-server")
        self._listener = listen(self.settings)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> ScriptedServer:
        self.model.engine.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()
        self.model.engine.close()
        self.service.text_threads.shutdown()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._server.serve(sockets=[self._listener]))

    def assert_idle(self) -> None:
        """Nothing runs or waits, and every block is free."""
        self.engine.check_integrity()
        stats = self.engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.blocks_used) == (0, 0, 0)
