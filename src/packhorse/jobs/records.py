"""Lines of the output: made, and read back.

    {"id": "batch_req_JOB_LINE", "custom_id": …, "response": {"status_code", "request_id", "body"} | null,
     "error": null | {"code", "message", "line", "param"}}

The id comes from the job and the line alone, so that a resumed job knows what is done.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from packhorse.api.errors import error_body
from packhorse.errors import PackhorseError
from packhorse.jobs.line_requests import CustomId

_ID = re.compile(rb'\{"id":"batch_req_([0-9a-f]+)_([0-9]+)",')

_LINE_SEPARATORS = {"\u2028".encode(): b"\\u2028", "\u2029".encode(): b"\\u2029", "\u0085".encode(): b"\\u0085"}


def success_record(job_id: str, line: int, custom_id: CustomId, body: dict[str, Any]) -> bytes:
    """The result of a line that was answered."""
    return _record(job_id, line, custom_id, _response(job_id, line, 200, body), None)


def error_record(job_id: str, line: int, custom_id: CustomId | None, error: PackhorseError, *, asked: bool) -> bytes:
    """The result of a line that failed. `asked`: there was a request, so there is a response to it, of its status."""
    response = _response(job_id, line, error.status, error_body(error)) if asked else None
    detail = {"code": error.code, "message": error.message, "line": line, "param": error.param}
    return _record(job_id, line, custom_id, response, detail)


def request_id(job_id: str, line: int) -> str:
    """Our name for a line's request; what a user calls it is never a key."""
    return f"{job_id}-{line}"


def _response(job_id: str, line: int, status: int, body: dict[str, Any]) -> dict[str, Any]:
    return {"status_code": status, "request_id": f"req-{request_id(job_id, line)}", "body": body}


def _record(
    job_id: str,
    line: int,
    custom_id: CustomId | None,
    response: dict[str, Any] | None,
    error: dict[str, Any] | None,
) -> bytes:
    data = orjson.dumps(
        {"id": f"batch_req_{job_id}_{line}", "custom_id": custom_id, "response": response, "error": error}
    )
    # Readers that cut at these characters, as Python's str.splitlines does, find no place to cut.
    for raw, escaped in _LINE_SEPARATORS.items():
        if raw in data:
            data = data.replace(raw, escaped)
    return data + b"\n"


@dataclass(frozen=True, slots=True)
class Found:
    """A complete record in a file of results: of which line, where, and what it says. offset, length: bytes."""

    line: int
    offset: int
    length: int
    ok: bool
    prompt_tokens: int
    completion_tokens: int

    @property
    def end(self) -> int:
        return self.offset + self.length


def scan(path: Path, job_id: str) -> Iterator[Found]:
    """Complete records of this job from the beginning of the file; the first that is torn or foreign ends it."""
    offset = 0
    with path.open("rb") as file:
        for raw in file:
            found = _read_back(raw, offset, job_id)
            if found is None:
                return
            yield found
            offset = found.end


def _read_back(raw: bytes, offset: int, job_id: str) -> Found | None:
    match = _ID.match(raw)
    if match is None or match[1] != job_id.encode() or not raw.endswith(b"}\n"):
        return None
    try:
        record = orjson.loads(raw)
        ok = record["error"] is None
        usage = record["response"]["body"]["usage"] if ok else {}
        return Found(
            line=int(match[2]),
            offset=offset,
            length=len(raw),
            ok=ok,
            prompt_tokens=usage.get("prompt_tokens", 0),
            completion_tokens=usage.get("completion_tokens", 0),
        )
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
