"""A program run in a real (pseudo) terminal, as a person would see it."""

from __future__ import annotations

import os
import pty
import subprocess


def seen_in_terminal(command: list[str]) -> str:
    """All that the command wrote to a terminal of 100 columns; it must succeed."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    seen = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        seen += data
    os.close(ours)
    assert process.wait() == 0
    return seen.decode()
