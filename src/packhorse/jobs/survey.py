"""One pass over the input before anything runs: is it what it was, how much is it, which ids come twice."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from packhorse.errors import InvalidRequest, JobError
from packhorse.jobs.inputs import InputFile, fields_of
from packhorse.jobs.line_requests import CustomId, custom_id_of

_ID_BYTES = 16
"""Of the hash kept for each custom_id: two ids of one file share 16 bytes less often than a disk lies."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What the file system says of a file; it changes when someone writes to it."""

    size: int
    modified_ns: int
    inode: int


@dataclass(frozen=True, slots=True)
class Duplicates:
    """Lines whose custom_id an earlier line has. lines: int64[D], sorted; first_lines: int64[D]."""

    lines: npt.NDArray[np.int64]
    first_lines: npt.NDArray[np.int64]

    def first_line(self, line: int) -> int | None:
        """The line that had this line's id first, or None where it has its own."""
        place = int(np.searchsorted(self.lines, line))
        return int(self.first_lines[place]) if place < len(self.lines) and self.lines[place] == line else None


@dataclass(frozen=True, slots=True)
class Survey:
    """sha256: of the file's bytes. records: entries, each to become one result. last_line: where the last begins."""

    sha256: str
    fingerprint: Fingerprint
    records: int
    last_line: int
    duplicates: Duplicates


def fingerprint(path: Path) -> Fingerprint:
    status = path.stat()
    return Fingerprint(status.st_size, status.st_mtime_ns, status.st_ino)


def survey(source: InputFile, check: Callable[[], None] = lambda: None) -> Survey:
    """Read the input once for its entries and once for its digest. Memory: 24 bytes a line, and nothing of its text.

    `check` is called now and then and may raise. Raises JobError when the file has no entries or changes meanwhile.
    """
    before = fingerprint(source.path)
    lines, digests = array("q"), bytearray()
    records = last_line = 0
    for entry in source.entries():
        records += 1
        last_line = entry.line
        if records % 1000 == 0:
            check()
        try:
            custom_id = custom_id_of(fields_of(entry), entry.line)
        except InvalidRequest:
            continue
        lines.append(entry.line)
        digests += _digest(custom_id)
    if not records:
        raise JobError(f"{source.path} holds no requests.")
    with source.path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if fingerprint(source.path) != before:
        raise JobError(f"{source.path} changes while it is read: wait until it is complete.")
    return Survey(sha256, before, records, last_line, _duplicates(lines, digests))


def _digest(custom_id: CustomId) -> bytes:
    """Equal ids of equal type, equal digests: 7 and "7" are different ids."""
    return hashlib.blake2b(f"{type(custom_id).__name__}:{custom_id}".encode(), digest_size=_ID_BYTES).digest()


def _duplicates(lines: array[int], digests: bytearray) -> Duplicates:
    halves = np.frombuffer(digests, dtype=np.uint64).reshape(-1, 2)
    order = np.lexsort((halves[:, 1], halves[:, 0]))  # stable: among equal ids the earliest line comes first
    ordered = halves[order]
    repeats = np.zeros(len(order), dtype=bool)
    repeats[1:] = (ordered[1:] == ordered[:-1]).all(axis=1)
    # Each repeat belongs to the last place before it that is none.
    group_starts = np.maximum.accumulate(np.where(repeats, 0, np.arange(len(order))))
    numbers = np.frombuffer(lines, dtype=np.int64)
    found = numbers[order[repeats]]
    first = numbers[order[group_starts[repeats]]]
    by_line = np.argsort(found)
    return Duplicates(found[by_line], first[by_line])
