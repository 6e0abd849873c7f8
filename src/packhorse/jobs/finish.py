"""From OUT.partial, in the order of finishing, to OUT: in the order of the input, in one atomic rename."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from packhorse.errors import JobError
from packhorse.jobs.files import JobFiles, sync_folder
from packhorse.jobs.journal import write_failure
from packhorse.jobs.records import scan

Int64 = npt.NDArray[np.int64]

_BUFFER = 1 << 20
_CHECK_EVERY = 1000


def finish(
    files: JobFiles,
    job_id: str,
    *,
    records: int,
    last_line: int,
    sort: bool,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Turn a complete OUT.partial into OUT. Killed at any point, calling it again does the rest.

    Memory: 16 bytes a line. Disk: a second copy while it sorts (none if the records are in order already).
    `check` is called now and then and may raise. Raises JobError when results are missing or the disk is full.
    """
    offsets, lengths, tidy = _index(files, job_id, last_line, check)
    found = int(np.count_nonzero(lengths))
    if found != records:
        raise JobError(
            f"{files.partial} has results of {found} lines, and {records} were expected: run the same command again."
        )
    order = np.flatnonzero(lengths)
    in_order = bool((np.diff(offsets[order]) > 0).all())
    if tidy and (in_order or not sort):
        files.partial.replace(files.output)
        sync_folder(files.output.parent)
        return
    if not sort:
        order = order[np.argsort(offsets[order])]
    _copy(files, offsets[order], lengths[order], check)


def _index(files: JobFiles, job_id: str, last_line: int, check: Callable[[], None]) -> tuple[Int64, Int64, bool]:
    """By line: where its last record begins and how long it is (0: none). And whether no record is superseded."""
    offsets, lengths = np.zeros(last_line + 1, dtype=np.int64), np.zeros(last_line + 1, dtype=np.int64)
    count = 0
    for count, found in enumerate(scan(files.partial, job_id), start=1):
        if found.line <= last_line:
            offsets[found.line], lengths[found.line] = found.offset, found.length
        if count % _CHECK_EVERY == 0:
            check()
    return offsets, lengths, count == int(np.count_nonzero(lengths))


def _copy(files: JobFiles, offsets: Int64, lengths: Int64, check: Callable[[], None]) -> None:
    try:
        with files.partial.open("rb") as source, files.sorting.open("wb", buffering=_BUFFER) as target:
            for record in _records(source.fileno(), offsets, lengths, check):
                target.write(record)
            target.flush()
            os.fsync(target.fileno())
    except OSError as error:
        files.sorting.unlink(missing_ok=True)
        raise _no_room(files, error) from error
    files.sorting.replace(files.output)
    sync_folder(files.output.parent)
    files.partial.unlink()


def _records(fd: int, offsets: Int64, lengths: Int64, check: Callable[[], None]) -> Iterator[bytes]:
    for count, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        if count % _CHECK_EVERY == 0:
            check()
        yield os.pread(fd, int(length), int(offset))


def _no_room(files: JobFiles, error: OSError) -> JobError:
    failure = write_failure(files.sorting, error)
    size = files.partial.stat().st_size / 1e6
    return JobError(
        f"{failure.message} Putting the results in order needs {size:.1f} MB beside them; --no-sort needs none.",
        code=failure.code,
    )
