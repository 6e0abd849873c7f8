"""Runs jobs in processes of their own, for tests that kill them: python -m tests.jobs.driver

Reads a job as a line of JSON (options of `JobSpec`, and what `run` takes beside them), forks a process for it, prints
its pid. At the next line it waits and prints the exit code (negative: the signal that killed it); until then the pid
stays taken.
Forking after the imports makes a start take milliseconds.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

from packhorse.errors import PackhorseError
from packhorse.jobs.job import JobSpec, run_job
from packhorse.jobs.signals import StopSignals
from tests.jobs.scripted import scripted_model


def run(options: dict[str, Any]) -> int:
    """engine: its settings. file_limit: bytes a file may have. error: where to write the message of an error."""
    engine = options.pop("engine", {})
    error_file = options.pop("error", os.devnull)
    file_limit = options.pop("file_limit", None)
    if file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    spec = JobSpec(**{**options, "input": Path(options["input"]), "output": Path(options["output"])})
    try:
        report = run_job(spec, lambda: scripted_model(**engine), signals=StopSignals(), wall=lambda: 0.0)
    except PackhorseError as error:
        Path(error_file).write_text(error.message)
        return error.exit_code
    return report.exit_code


def main() -> None:
    # The kernel keeps what a killed process wrote; waiting for the disk would only make the rounds slow.
    os.fsync = lambda fd: None  # noqa: ARG005
    while line := sys.stdin.readline():
        options = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                code = run(options)
            finally:
                os._exit(code)
        print(pid, flush=True)
        sys.stdin.readline()
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
