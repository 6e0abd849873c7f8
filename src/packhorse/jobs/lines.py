"""Physical lines of a file, as bytes.

Lines end at LF bytes and nowhere else: U+2028, U+0085, VT and FF, at which `str.splitlines` cuts, may stand inside a
JSON string. A carriage return before the LF belongs to the line's end, and a byte order mark before the first line to
nothing. Lines of nothing but whitespace are skipped, yet counted: numbers are those an editor shows.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

MAX_LINE_BYTES = 32 << 20
"""A longer line is not kept in memory: it is reported by its number and size."""


@dataclass(frozen=True, slots=True)
class Line:
    """One physical line that is not blank. number: from 1. data: without its end; None when it is too long.

    size: bytes, its end included.
    """

    number: int
    data: bytes | None
    size: int


def read_lines(file: BinaryIO, max_bytes: int = MAX_LINE_BYTES) -> Iterator[Line]:
    """The lines of `file` from where it stands, which must be its beginning."""
    number = 0
    limit = max_bytes + 1 + len(codecs.BOM_UTF8)  # room for a mark before the first line, too little to matter later
    while raw := file.readline(limit):
        number += 1
        cut = len(raw) == limit and not raw.endswith(b"\n")
        if number == 1:
            raw = raw.removeprefix(codecs.BOM_UTF8)
        if cut:
            rest, blank = _skip_line(file, max_bytes)
            if not blank or raw.strip():
                yield Line(number, None, len(raw) + rest)
        elif raw.strip():
            yield Line(number, raw.removesuffix(b"\n").removesuffix(b"\r"), len(raw))


def _skip_line(file: BinaryIO, chunk: int) -> tuple[int, bool]:
    """Read to the end of the line: how many bytes that were, and whether all of them were whitespace."""
    size, blank = 0, True
    while raw := file.readline(chunk):
        size += len(raw)
        blank = blank and not raw.strip()
        if raw.endswith(b"\n"):
            break
    return size, blank
