"""`--strict`: look at every line as the run would, before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from packhorse.errors import JobError, PackhorseError
from packhorse.jobs.inputs import Entry
from packhorse.jobs.prepare import FailedLine, PreparedLine, Preparer

if TYPE_CHECKING:
    from packhorse.engine.engine import Engine

_SHOWN = 20


def refuse_bad_lines(
    entries: Iterator[Entry], preparer: Preparer, engine: Engine, check: Callable[[], None] = lambda: None
) -> None:
    """Raises JobError that lists the first bad lines. Every line is tokenized and offered to the engine."""
    problems: list[str] = []
    count = 0
    for entry in entries:
        check()
        prepared = preparer.prepare(entry)
        error = prepared.error if isinstance(prepared, FailedLine) else _offer(prepared, engine)
        if error is None:
            continue
        count += 1
        if len(problems) < _SHOWN:
            problems.append(f"  line {entry.line}: {error.message}")
    if count:
        more = [f"  … and {count - _SHOWN} more"] if count > _SHOWN else []
        raise JobError(
            "\n".join([f"{count} lines cannot run, so with --strict none does:", *problems, *more]),
            code="invalid_input",
        )


def _offer(prepared: PreparedLine, engine: Engine) -> PackhorseError | None:
    """Why the engine would refuse the line; it does not run."""
    try:
        for request in prepared.engine_requests:
            engine.submit(request)
            engine.abort(request.request_id)
    except PackhorseError as error:
        return error
    finally:
        engine.step()  # gives back what was aborted
    return None
