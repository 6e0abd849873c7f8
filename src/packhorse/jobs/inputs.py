"""Input files of every format as a stream of entries, one a request.

A bad entry is part of the stream, so that it gets its error record; only what makes the whole file unreadable raises.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

from packhorse.errors import ConfigError, InvalidRequest, JobError
from packhorse.jobs.lines import MAX_LINE_BYTES, Line, read_lines

InputFormat = Literal["jsonl", "txt", "csv", "parquet"]
Fields = dict[str, Any]

_FORMATS: dict[str, InputFormat] = {".txt": "txt", ".csv": "csv", ".parquet": "parquet", ".pq": "parquet"}
_PARQUET_ROWS = 1024

_OTHER_KINDS = {
    rb"\x1f\x8b\x08": "gzip-compressed: unpack it first (gunzip --keep)",
    rb"\x28\xb5\x2f\xfd": "zstd-compressed: unpack it first (unzstd)",
    rb"PK\x03\x04": "a zip archive: unpack it first",
    rb"\xff\xfe.\x00|\xfe\xff\x00.": "UTF-16 text: save it as UTF-8",
    rb"PAR1": "a Parquet file: say so with --format parquet",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """What stands at one place of the input.

    line: the physical line where it begins, from 1 (Parquet: the row). raw: a JSON line as bytes, not parsed yet; or
    the fields of a request; or why it is none.
    """

    line: int
    raw: bytes | Fields | InvalidRequest


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file of requests. column: of .csv and .parquet, where the prompts are. chat: texts are users' messages."""

    path: Path
    format: InputFormat
    column: str | None = None
    chat: bool = False

    def entries(self) -> Iterator[Entry]:
        """All entries in order, read as a stream. Raises JobError when the file cannot be read as what it should be."""
        try:
            if self.format == "parquet":
                yield from _parquet_entries(self)
            elif self.format == "csv":
                yield from _csv_entries(self)
            else:
                yield from _line_entries(self)
        except OSError as error:
            raise JobError(f"{self.path} cannot be read: {error.strerror or error}.") from error


def open_input(path: Path, *, format: InputFormat | None, column: str | None, chat: bool) -> InputFile:
    """Choose the format (by the name's ending; .jsonl and unknown ones are JSON lines) and check the options beside it.

    Raises ConfigError for options that do not fit the format, JobError for a file of another kind.
    """
    chosen = format or _FORMATS.get(path.suffix.lower(), "jsonl")
    if column is not None and chosen in ("jsonl", "txt"):
        raise ConfigError(f"column is for .csv and .parquet, and {path.name} is read as {chosen}.", param="column")
    if chat and chosen == "jsonl":
        raise ConfigError('chat is for bare texts; in JSON lines write {"messages": …} instead.', param="chat")
    if chosen != "parquet":
        _refuse_binary(path)
    return InputFile(path, chosen, column, chat)


def _refuse_binary(path: Path) -> None:
    try:
        with path.open("rb") as file:
            head = file.read(4)
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror or error}.") from error
    kind = other_kind(head)
    if kind is not None:
        raise JobError(f"{path} is {kind}.")


def other_kind(head: bytes) -> str | None:
    """What a file that begins like this is, and what to do; None when it may be lines of text."""
    return next((kind for magic, kind in _OTHER_KINDS.items() if re.match(magic, head, re.DOTALL)), None)


def fields_of(entry: Entry) -> Fields:
    """The entry's fields. Raises InvalidRequest that says why it is no request."""
    if isinstance(entry.raw, bytes):
        return parse_json_line(entry.raw)
    if isinstance(entry.raw, InvalidRequest):
        raise entry.raw
    return entry.raw


def parse_json_line(data: bytes) -> Fields:
    """The object on a line. Raises InvalidRequest when it is not UTF-8, not JSON, or not an object."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        _decode(data)
        raise InvalidRequest(
            f"The line is not JSON: {error.msg} (column {error.colno}).", code="invalid_json"
        ) from None
    if not isinstance(value, dict):
        raise InvalidRequest(
            f"The line is a JSON {_JSON_NAMES.get(type(value), 'number')}, not an object.", code="not_an_object"
        )
    return value


_JSON_NAMES: dict[type, str] = {type(None): "null", bool: "boolean", str: "string", list: "list"}


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"The line is not UTF-8: byte 0x{data[error.start]:02X} at place {error.start}.", code="invalid_utf8"
        ) from None


def _line_entries(source: InputFile) -> Iterator[Entry]:
    with source.path.open("rb") as file:
        for line in read_lines(file):
            yield Entry(line.number, _line_content(line, source))


def _line_content(line: Line, source: InputFile) -> bytes | Fields | InvalidRequest:
    if line.data is None:
        return InvalidRequest(
            f"The line has {line.size} bytes; at most {MAX_LINE_BYTES} are read.", code="line_too_long"
        )
    if source.format == "jsonl":
        return line.data
    try:
        return _text_fields(_decode(line.data), source.chat)
    except InvalidRequest as problem:
        return problem


def _text_fields(value: Any, chat: bool) -> Fields:
    """A cell or a line of text as the simple line that says the same."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {"messages": value}
    return {"messages": [{"role": "user", "content": value}]} if chat else {"prompt": value}


@dataclass(frozen=True, slots=True)
class _Columns:
    """Where in a row the prompt is, and the custom_id if there is such a column."""

    prompt: int
    custom_id: int | None


def _choose_columns(names: list[str], source: InputFile) -> _Columns:
    wanted = source.column
    if wanted is None:
        usual = [name for name in ("prompt", "messages", "text") if name in names]
        wanted = usual[0] if usual else names[0] if len(names) == 1 else None
    if wanted is None or wanted not in names:
        asked = f"has no column {wanted!r}" if wanted else "has several columns"
        raise ConfigError(
            f"{source.path.name} {asked}: say which holds the prompts with --column. Columns: {', '.join(names)}.",
            param="column",
        )
    return _Columns(names.index(wanted), names.index("custom_id") if "custom_id" in names else None)


def _csv_entries(source: InputFile) -> Iterator[Entry]:
    csv.field_size_limit(MAX_LINE_BYTES)
    # Bytes that are not UTF-8 pass as surrogates, so that they spoil one row and not the file.
    with source.path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(file)
        columns: _Columns | None = None
        while True:
            line = reader.line_num + 1
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield Entry(line, InvalidRequest(f"The row is not CSV: {error}.", code="invalid_csv"))
                continue
            if not any(cell.strip() for cell in row):
                continue
            if columns is None:
                columns = _choose_columns(row, source)
            else:
                yield Entry(line, _csv_content(row, columns, source))


def _csv_content(row: list[str], columns: _Columns, source: InputFile) -> Fields | InvalidRequest:
    if columns.prompt >= len(row):
        return InvalidRequest(f"The row has {len(row)} cells and none for the prompt.", code="invalid_csv")
    try:
        "".join(row).encode()
    except UnicodeEncodeError:
        return InvalidRequest("The row is not UTF-8.", code="invalid_utf8")
    fields = _text_fields(row[columns.prompt], source.chat)
    if columns.custom_id is not None and columns.custom_id < len(row):
        fields["custom_id"] = row[columns.custom_id]
    return fields


def _parquet_entries(source: InputFile) -> Iterator[Entry]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise JobError("Reading .parquet needs pyarrow: pip install 'packhorse[parquet]'.") from None
    try:
        file = parquet.ParquetFile(source.path)
        names = list(file.schema_arrow.names)
        columns = _choose_columns(names, source)
        used = [names[i] for i in (columns.prompt, columns.custom_id) if i is not None]
        row = 0
        for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=used):
            for values in batch.to_pylist():
                row += 1
                yield Entry(row, _parquet_content(values, names[columns.prompt], source))
    except arrow.ArrowInvalid as error:
        raise JobError(f"{source.path} cannot be read as Parquet: {error}.") from error


def _parquet_content(values: Fields, prompt: str, source: InputFile) -> Fields:
    fields = _text_fields(values[prompt], source.chat)
    if values.get("custom_id") is not None:
        fields["custom_id"] = values["custom_id"]
    return fields
