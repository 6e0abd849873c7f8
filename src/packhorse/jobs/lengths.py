"""How long the requests of a file are, in tokens: what buckets and a context length are chosen by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from packhorse.api.requests import parse_request, tokenize
from packhorse.engine.lengths import LengthHistogram
from packhorse.errors import ContextLengthExceeded, PackhorseError
from packhorse.jobs.inputs import Entry, fields_of
from packhorse.jobs.line_requests import read_line

if TYPE_CHECKING:
    from packhorse.text.tokenizer import Tokenizer

_NAMED = 20


@dataclass(slots=True)
class FileLengths:
    """prompts: tokens of each prompt. totals: with max_tokens added, as far as max_len allows: what the dynamic policy
    groups by. open_ended: prompts without max_tokens, which count as long as they are. bad_lines: how many could not
    be read; problems: the first of them, by line.
    """

    prompts: LengthHistogram = field(default_factory=LengthHistogram)
    totals: LengthHistogram = field(default_factory=LengthHistogram)
    open_ended: int = 0
    bad_lines: int = 0
    problems: list[tuple[int, str]] = field(default_factory=list)


def file_lengths(
    entries: Iterator[Entry], tokenizer: Tokenizer, *, defaults: dict[str, Any], max_len: int
) -> FileLengths:
    """Tokenize every line as a job would, and keep only the counts. defaults: sampling fields of simple lines.

    Which model a line names, and whether its custom_id is its own, does not matter here.
    """
    found = FileLengths()
    for entry in entries:
        try:
            lengths, max_tokens = _measure(entry, tokenizer, defaults, max_len)
        except Exception as error:  # as in a job: one line must not end the others, whatever is wrong with it
            found.bad_lines += 1
            if len(found.problems) < _NAMED:
                message = (
                    error.message if isinstance(error, PackhorseError) else f"The line could not be read: {error!r}."
                )
                found.problems.append((entry.line, message))
            continue
        for length in lengths:
            found.prompts.add(length)
            found.totals.add(length if max_tokens is None else min(length + max_tokens, max_len))
        found.open_ended += len(lengths) if max_tokens is None else 0
    return found


def _measure(
    entry: Entry, tokenizer: Tokenizer, defaults: dict[str, Any], max_len: int
) -> tuple[list[int], int | None]:
    """Tokens of each of a line's prompts, and its max_tokens. Raises PackhorseError for what a job would refuse."""
    line = read_line(fields_of(entry), defaults)
    request = parse_request(line.endpoint, line.body)
    lengths = [len(prompt.token_ids) for prompt in tokenize(request, tokenizer)]
    if max(lengths) > max_len:
        raise ContextLengthExceeded(f"The prompt has {max(lengths)} tokens and at most {max_len} fit.", param="prompt")
    return lengths, request.params.max_tokens
