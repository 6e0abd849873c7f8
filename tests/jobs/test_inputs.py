"""Input files of every format become the same entries."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from packhorse.errors import ConfigError, InvalidRequest, JobError
from packhorse.jobs.inputs import fields_of, open_input
from packhorse.jobs.lines import read_lines


def read(path: Path, **options: Any) -> list[tuple[int, Any]]:
    """Line and fields, or line and the error's code."""
    source = open_input(path, **{"format": None, "column": None, "chat": False} | options)
    found: list[tuple[int, Any]] = []
    for entry in source.entries():
        try:
            found.append((entry.line, fields_of(entry)))
        except InvalidRequest as error:
            found.append((entry.line, error.code))
    return found


def test_json_lines_that_are_no_requests_say_why(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(
        b'{"prompt": "a"}\n[1,2]\nnull\n"x"\n5\ntrue\n{"a": \xff}\n{"prompt": "b\n{"a": NaN}\n' + b"[" * 2000
    )
    assert read(path) == [
        (1, {"prompt": "a"}),
        *[(line, "not_an_object") for line in (2, 3, 4, 5, 6)],
        (7, "invalid_utf8"),
        *[(line, "invalid_json") for line in (8, 9, 10)],
    ]


def test_a_line_of_unusual_length_is_reported_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_lines, "__defaults__", (100,))
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"prompt": "' + b"a" * 1000 + b'"}\n{"prompt": "b"}\n')
    assert read(path) == [(1, "line_too_long"), (2, {"prompt": "b"})]


def test_text_is_a_prompt_a_line_or_a_message_a_line(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes("  one\u2028two \r\n\r\n你好\n".encode() + b"\xff")
    assert read(path) == [(1, {"prompt": "  one\u2028two "}), (3, {"prompt": "你好"}), (4, "invalid_utf8")]
    assert read(path, chat=True)[1] == (3, {"messages": [{"role": "user", "content": "你好"}]})


def test_csv_rows_may_span_lines_and_carry_ids(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_bytes(b'\xef\xbb\xbfcustom_id,text,other\r\na,"one, ""1""\nmore",x\r\n\r\nb,two,y\r\nc\r\nd,\xff,z\r\n')
    assert read(path, column="text") == [
        (2, {"prompt": 'one, "1"\nmore', "custom_id": "a"}),
        (5, {"prompt": "two", "custom_id": "b"}),
        (6, "invalid_csv"),
        (7, "invalid_utf8"),
    ]
    assert read(path) == read(path, column="text")


def test_a_csv_column_must_be_there(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("question,answer\na,b\n")
    for options, said in (({}, "several columns"), ({"column": "prompt"}, "no column 'prompt'")):
        with pytest.raises(ConfigError, match="question, answer") as caught:
            read(path, **options)
        assert said in caught.value.message
    path.write_text("question\na\n")
    assert read(path) == [(2, {"prompt": "a"})]


def test_parquet_columns_hold_texts_ids_or_messages(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    table = arrow.table(
        {
            "text": ["a", None, "c"],
            "ids": [[1, 2], [3], [4]],
            "turns": [[{"role": "user", "content": "x"}]] * 3,
            "custom_id": ["p", "q", None],
        }
    )
    parquet.write_table(table, path, row_group_size=2)
    assert read(path) == read(path, column="text")
    assert read(path, column="text") == [
        (1, {"prompt": "a", "custom_id": "p"}),
        (2, {"prompt": None, "custom_id": "q"}),
        (3, {"prompt": "c"}),
    ]
    assert read(path, column="ids")[1] == (2, {"prompt": [3], "custom_id": "q"})
    assert read(path, column="turns")[2] == (3, {"messages": [{"role": "user", "content": "x"}]})
    path.write_bytes(b"not parquet")
    with pytest.raises(JobError, match="Parquet"):
        read(path)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(JobError, match=r"packhorse\[parquet\]"):
        read(tmp_path / "in.parquet")


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (b"\x1f\x8b\x08", "gunzip"),
        (b"\xff\xfea\x00", "UTF-16"),
        (b"\xfe\xff\x00a", "UTF-16"),
        (b"PK\x03\x04", "zip"),
        (b"PAR1", "--format parquet"),
    ],
)
def test_a_file_of_another_kind_is_refused_as_a_whole(tmp_path: Path, head: bytes, said: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(head)
    with pytest.raises(JobError, match=said):
        read(path)


def test_options_must_fit_the_format(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a"}\n')
    for options in ({"column": "a"}, {"chat": True}):
        with pytest.raises(ConfigError):
            read(path, **options)
    assert read(path, format="txt") == [(1, {"prompt": '{"prompt": "a"}'})]
