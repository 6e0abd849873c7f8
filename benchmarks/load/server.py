"""A server process to measure: `packhorse serve` on a free port."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

_PORT = re.compile(r":(\d+)$")


@dataclass(frozen=True, slots=True)
class Running:
    """port: of 127.0.0.1. process: for its memory. log: its JSON lines so far."""

    port: int
    process: psutil.Process
    log: Path

    def metric(self, name: str) -> float:
        """A value of /metrics, of the first line that begins so; the prefix is left out."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics") as response:
            lines = response.read().decode().splitlines()
        return float(next(line for line in lines if line.startswith(f"packhorse:{name}")).rsplit(" ", 1)[1])

    def memory_mib(self) -> float:
        return float(self.process.memory_info().rss) / (1 << 20)


@contextmanager
def serving(model: str, *options: str) -> Iterator[Running]:
    """Until the block is left; then it drains and must end cleanly."""
    with TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        command = [sys.executable, "-m", "packhorse", "serve", model, "--port", "0", *options]
        with log.open("wb") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        found = _PORT.search(process.stdout.readline().strip())
        if found is None:
            raise SystemExit(f"The server did not start:\n{log.read_text()}")
        try:
            yield Running(int(found[1]), psutil.Process(process.pid), log)
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(120)
        if code:
            raise SystemExit(f"The server ended with {code}:\n{log.read_text()[-2000:]}")
