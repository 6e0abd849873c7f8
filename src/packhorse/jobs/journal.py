"""OUT.partial: results appended as they finish, so that what is there after any crash is true and complete.

A record is one write of one line. A write that was cut short leaves a torn last line; it is cut off when the file is
opened again (and at once, when a full disk was the cause), and its request runs again.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from packhorse.errors import JobError

SYNC_SECONDS = 1.0
"""How much finished work a power cut may cost. A killed process costs none: the kernel has what was written."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Journal:
    """The open file. `clock`: seconds, monotonic."""

    def __init__(self, path: Path, fd: int, size: int, clock: Callable[[], float]) -> None:
        self._path = path
        self._fd = fd
        self._size = size
        self._clock = clock
        self._synced_size, self._synced_at = size, clock()

    def append(self, record: bytes) -> None:
        """Write one line. Raises JobError, with the file cut back to its last complete line, when it cannot."""
        rest = memoryview(record)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            self._cut_back()
            raise self._failure(error) from error
        self._size += len(record)

    def sync_if_due(self) -> None:
        """To the disk, at most about once in SYNC_SECONDS."""
        if self._size != self._synced_size and self._clock() - self._synced_at >= SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise self._failure(error) from error
        self._synced_size, self._synced_at = self._size, self._clock()

    def close(self) -> None:
        os.close(self._fd)

    def _cut_back(self) -> None:
        try:
            os.ftruncate(self._fd, self._size)
        except OSError:  # the torn line is cut off when the job goes on
            return

    def _failure(self, error: OSError) -> JobError:
        return write_failure(self._path, error)


def write_failure(path: Path, error: OSError) -> JobError:
    """What to tell a user whose disk takes no more."""
    if error.errno in _FULL:
        return JobError(
            f"{path} cannot grow: {error.strerror}. All finished results are kept: make room and run the same command "
            "again.",
            code="disk_full",
        )
    return JobError(
        f"{path} cannot be written: {error.strerror}. Finished results are kept: run the same command again.",
        code="write_failed",
    )


def open_journal(path: Path, clock: Callable[[], float]) -> Journal:
    """Open it, or create it; what is in it must be complete records."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        size = os.fstat(fd).st_size
    except OSError as error:
        raise write_failure(path, error) from error
    return Journal(path, fd, size, clock)


def cut_torn_tail(path: Path, end: int) -> int:
    """Cut off what lies past `end`, where the last complete record ends; how many bytes that were."""
    torn = path.stat().st_size - end
    if torn:
        try:
            os.truncate(path, end)
        except OSError as error:
            raise write_failure(path, error) from error
    return torn
