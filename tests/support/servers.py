"""Real servers: `packhorse serve` in a process of its own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

import psutil


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

    def memory(self) -> int:
        """Bytes that are resident."""
        return int(psutil.Process(self.process.pid).memory_info().rss)
