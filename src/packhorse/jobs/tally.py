"""What is done of a job, line by line, and how it went."""

from __future__ import annotations

from pathlib import Path

from packhorse.jobs.records import Found, scan

_NOT_DONE, _OK, _FAILED = 0, 1, 2


class Tally:
    """One byte a line. ok, failed: lines with a result, a later result of a line counting instead of the earlier."""

    def __init__(self, last_line: int) -> None:
        self._state = bytearray(last_line + 1)
        self.ok = self.failed = 0
        self.prompt_tokens = self.completion_tokens = 0

    @property
    def done(self) -> int:
        return self.ok + self.failed

    def add(self, found: Found) -> None:
        """Count a record that was read back."""
        if found.line < len(self._state):
            self.count(found.line, found.ok, found.prompt_tokens, found.completion_tokens)

    def count(self, line: int, ok: bool, prompt_tokens: int = 0, completion_tokens: int = 0) -> None:
        if self._state[line] == _FAILED:
            self.failed -= 1
        elif self._state[line] == _OK:
            return
        self._state[line] = _OK if ok else _FAILED
        self.ok += ok
        self.failed += not ok
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens

    def is_done(self, line: int) -> bool:
        return self._state[line] != _NOT_DONE

    def reopen_failed(self) -> int:
        """Forget the failed lines, so that they run again; how many there were."""
        count = self.failed
        self._state = self._state.replace(bytes([_FAILED]), bytes([_NOT_DONE]))
        self.failed = 0
        return count


def tally_file(path: Path, job_id: str, last_line: int) -> tuple[Tally, int]:
    """What a file of results holds, and where its last complete record ends; nothing, if there is no such file."""
    tally, end = Tally(last_line), 0
    if path.exists():
        for found in scan(path, job_id):
            tally.add(found)
            end = found.end
    return tally, end
