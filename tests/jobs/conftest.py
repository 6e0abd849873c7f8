from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.jobs.scripted import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a power cut could tell the difference, and tests make none."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # noqa: ARG005


class Driver:
    """Jobs in processes that a test may kill; see tests/jobs/driver.py."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def start(self, bench: Bench, **options: Any) -> int:
        """The pid of the job's process, which stays taken until `wait`, which must follow."""
        self._say(json.dumps({"input": str(bench.input), "output": str(bench.output)} | options))
        return int(self._hear())

    def wait(self) -> int:
        """The exit code, negative for a signal."""
        self._say("wait")
        return int(self._hear())

    def signal_when(self, due: Callable[[], bool], pid: int, number: int) -> None:
        """Send the signal as soon as it is due, or do nothing if the process ends before."""
        process = psutil.Process(pid)
        while process.status() != psutil.STATUS_ZOMBIE:
            if due():
                process.send_signal(number)
                return

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def finish(self, bench: Bench, **options: Any) -> int:
        self.start(bench, **options)
        return self.wait()


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    command = [sys.executable, "-m", "tests.jobs.driver"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Driver(process)
        assert process.stdin is not None
        process.stdin.close()
