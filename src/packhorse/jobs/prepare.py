"""From an entry of the input to requests that the engine can take, or to the error that the line's record will hold."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from packhorse.api.requests import ApiRequest, engine_requests, parse_request, refuse_other_model, tokenize
from packhorse.engine.request import Request
from packhorse.errors import InvalidRequest, PackhorseError
from packhorse.jobs.inputs import Entry, fields_of
from packhorse.jobs.line_requests import CustomId, LineRequest, custom_id_of, read_line
from packhorse.jobs.records import request_id
from packhorse.jobs.survey import Duplicates

if TYPE_CHECKING:
    from packhorse.text.tokenizer import Tokenizer

_MAX_NAMES = 50
_INDEX = re.compile(r"\[\d+\]")


@dataclass(frozen=True, slots=True)
class PreparedLine:
    """A line that may be submitted: one engine request for each of its prompts."""

    line: int
    custom_id: CustomId
    request: ApiRequest
    engine_requests: list[Request]


@dataclass(frozen=True, slots=True)
class FailedLine:
    """A line that cannot. asked: it was a request to an endpoint of ours, and the request is at fault."""

    line: int
    custom_id: CustomId | None
    error: PackhorseError
    asked: bool


@dataclass(slots=True)
class UnknownField:
    """A field that was ignored: on how many lines, and where first."""

    name: str
    first_line: int
    lines: int = 0


def seeded(request: Request) -> Request:
    """The request with a seed that follows from the job, the line and the prompt, unless it has one or needs none.

    So a job that is resumed or run again gives the same file, and no two prompts of it share their random numbers.
    """
    if request.params.greedy or request.params.seed is not None:
        return request
    digest = hashlib.sha256(request.request_id.encode()).digest()
    seed = int.from_bytes(digest[:8], "big") >> 1  # 63 bits, as the engine's own
    return replace(request, params=request.params.model_copy(update={"seed": seed}))


@dataclass(frozen=True, slots=True)
class Preparer:
    """What all lines of a job have in common.

    names: what a line may call the model; without one it takes the model that is loaded. defaults: sampling fields of
    simple lines. unknown_fields: collected on the way, by name.
    """

    job_id: str
    tokenizer: Tokenizer
    names: frozenset[str]
    duplicates: Duplicates
    defaults: dict[str, Any]
    strict_fields: bool = False
    unknown_fields: dict[str, UnknownField] = field(default_factory=dict)

    def prepare(self, entry: Entry) -> PreparedLine | FailedLine:
        """Never raises for what a line holds."""
        custom_id: CustomId | None = None
        asked = False
        try:
            fields = fields_of(entry)
            custom_id = custom_id_of(fields, entry.line)
            self._refuse_duplicate(entry.line, custom_id)
            line = read_line(fields, self.defaults)
            asked = True
            return self._prepare(entry.line, custom_id, line)
        except PackhorseError as error:
            return FailedLine(entry.line, custom_id, error, asked)
        except Exception as error:  # one line must not end a job of a million, whatever is wrong with it or with us
            failure = PackhorseError(f"The line could not be read: {error!r}.")
            return FailedLine(entry.line, custom_id, failure, asked)

    def _prepare(self, number: int, custom_id: CustomId, line: LineRequest) -> PreparedLine:
        refuse_other_model(line.body.get("model") if isinstance(line.body, dict) else None, self.names)
        request = parse_request(line.endpoint, line.body, strict_fields=self.strict_fields)
        self._note_unknown(number, (*line.unknown_fields, *request.unknown_fields))
        prompts = tokenize(request, self.tokenizer)
        requests = engine_requests(request, prompts, request_id(self.job_id, number))
        return PreparedLine(number, custom_id, request, list(map(seeded, requests)))

    def _refuse_duplicate(self, line: int, custom_id: CustomId) -> None:
        first = self.duplicates.first_line(line)
        if first is not None:
            raise InvalidRequest(
                f"custom_id {custom_id!r} is that of line {first} already: every line needs its own.",
                param="custom_id",
                code="duplicate_custom_id",
            )

    def _note_unknown(self, line: int, names: tuple[str, ...]) -> None:
        if names and self.strict_fields:
            raise InvalidRequest(f"{names[0]} is not a known field.", param=names[0], code="unknown_parameter")
        for name in {_INDEX.sub("[]", name) for name in names}:
            if name in self.unknown_fields or len(self.unknown_fields) < _MAX_NAMES:
                self.unknown_fields.setdefault(name, UnknownField(name, line)).lines += 1
