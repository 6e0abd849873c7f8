"""Physical lines: split at LF bytes and nowhere else."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.jobs.lines import Line, read_lines

BOM = b"\xef\xbb\xbf"

PIECES = st.sampled_from(
    [b"\n", b"\r", b"\r\n", b" ", b"\t", b"a", b"{}", b"\xff", b"\xe2\x80\xa8", b"\x0b", b"\x85", BOM]
)
FILES = st.lists(PIECES, max_size=60).map(b"".join) | st.binary(max_size=200)


def lines(data: bytes, max_bytes: int = 1000) -> list[Line]:
    return list(read_lines(io.BytesIO(data), max_bytes))


@given(FILES)
def test_every_line_that_is_not_blank_comes_once_with_its_number(data: bytes) -> None:
    physical = data.removeprefix(BOM).split(b"\n")
    expected = [(i, line.removesuffix(b"\r")) for i, line in enumerate(physical, start=1) if line.strip()]
    assert [(line.number, line.data) for line in lines(data)] == expected


@given(FILES, st.integers(1, 8))
def test_a_limit_changes_no_numbers_and_hides_only_longer_lines(data: bytes, limit: int) -> None:
    free, bounded = lines(data), lines(data, limit)
    assert [line.number for line in bounded] == [line.number for line in free]
    for whole, found in zip(free, bounded, strict=True):
        if found.data is None:
            assert found.size > limit
        else:
            assert found.data == whole.data


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c", "\r"])
def test_other_separators_stay_inside_their_line(separator: str) -> None:
    text = f"one{separator}two".encode()
    assert [line.data for line in lines(text + b"\nthree")] == [text, b"three"]


def test_crlf_blank_lines_and_a_missing_last_end_make_no_difference() -> None:
    assert [line.data for line in lines(b"a\r\n\r\n \t\r\nb")] == [b"a", b"b"]
    assert [line.number for line in lines(b"a\r\n\r\n \t\r\nb")] == [1, 4]
    assert lines(b"") == lines(b"\n\n \n") == lines(BOM + b"\n") == []


def test_a_byte_order_mark_belongs_to_no_line() -> None:
    assert [line.data for line in lines(BOM + b"a\n" + BOM + b"b")] == [b"a", BOM + b"b"]
