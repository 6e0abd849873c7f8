"""From a request's sequences to what its caller sees."""

from __future__ import annotations

from dataclasses import dataclass, replace

from packhorse.engine.logprobs import TokenLogprobs
from packhorse.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from packhorse.engine.request import Request
from packhorse.engine.sequence import NOT_RUNNING, Sequence
from packhorse.engine.table import SequenceTable
from packhorse.errors import PackhorseError
from packhorse.runner.base import Int32
from packhorse.text.tokenizer import Tokenizer


@dataclass(eq=False, slots=True)
class RequestState:
    """A request under way: its sequences (one for n greedy choices, else n), moments and error.

    number: of its arrival, never given again, unlike its id.
    """

    request: Request
    sequences: list[Sequence]
    arrival_time: float
    number: int = 0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    error: PackhorseError | None = None

    @property
    def finished(self) -> bool:
        return all(s.finished for s in self.sequences)


class OutputBuilder:
    """Makes RequestOutputs; keeps nothing but the tokenizer (None: no text) and where running tokens are."""

    def __init__(self, tokenizer: Tokenizer | None, table: SequenceTable) -> None:
        self._tokenizer = tokenizer
        self._table = table

    def build(self, state: RequestState, now: float) -> RequestOutput:
        """The request as it stands."""
        choices = [self._choice(sequence, state.request) for sequence in state.sequences]
        if len(choices) < state.request.params.n:  # greedy: computed once
            choices = [replace(choices[0], index=i) for i in range(state.request.params.n)]
        return RequestOutput(
            request_id=state.request.request_id,
            prompt=state.request.prompt,
            prompt_token_ids=[int(i) for i in state.request.prompt_token_ids],
            outputs=choices,
            finished=state.finished,
            prompt_logprobs=self._prompt_logprobs(state),
            error=state.error,
            metrics=RequestMetrics(
                arrival_time=state.arrival_time,
                first_scheduled_time=state.first_scheduled_time,
                first_token_time=state.first_token_time,
                finished_time=now if state.finished else None,
                num_preemptions=sum(s.num_preemptions for s in state.sequences),
            ),
        )

    def _choice(self, sequence: Sequence, request: Request) -> CompletionOutput:
        ids = self._output_ids(sequence).tolist()
        prefix = self._prompt_text(request) if sequence.params.echo else ""
        asked = sequence.params.logprobs is not None
        return CompletionOutput(
            index=sequence.index,
            text=prefix + self._text(sequence, ids),
            token_ids=ids,
            cumulative_logprob=sum(entry.logprob for entry in sequence.logprobs) if asked else None,
            logprobs=[self._entry(found) for found in sequence.logprobs] if asked else None,
            text_offsets=self._offsets(ids, len(prefix), sequence) if asked else None,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
        )

    def _output_ids(self, sequence: Sequence) -> Int32:
        row = sequence.row
        if row == NOT_RUNNING:
            return sequence.output_ids()
        return self._table.token_ids[row, sequence.prompt_len : self._table.num_tokens[row]]

    def _text(self, sequence: Sequence, ids: list[int]) -> str:
        if sequence.text is not None:
            return sequence.text.text
        if self._tokenizer is None:
            return ""
        shown = ids[:-1] if isinstance(sequence.stop_reason, int) else ids
        return self._tokenizer.decode(shown, sequence.params.skip_special_tokens)

    def _prompt_text(self, request: Request) -> str:
        if request.prompt is not None or self._tokenizer is None:
            return request.prompt or ""
        return self._tokenizer.decode(list(request.prompt_token_ids), skip_special_tokens=False)

    def _offsets(self, ids: list[int], begin: int, sequence: Sequence) -> list[int]:
        """Where each token's first character stands; what a stop string cut off points to the end of the text."""
        if self._tokenizer is None:
            return [begin] * len(ids)
        decoder = self._tokenizer.stream(sequence.params.skip_special_tokens)
        end = begin + len(self._text(sequence, ids))
        offsets, length = [], begin
        for token in ids:
            offsets.append(min(length, end))
            length += len(decoder.push(token))
        return offsets

    def _prompt_logprobs(self, state: RequestState) -> list[dict[int, Logprob] | None] | None:
        if state.request.params.prompt_logprobs is None:
            return None
        return [None, *(self._entry(found) for found in state.sequences[0].prompt_logprobs)]

    def _entry(self, found: TokenLogprobs) -> dict[int, Logprob]:
        entry = {found.token_id: Logprob(found.logprob, found.rank, self._token_text(found.token_id))}
        for rank, (token, value) in enumerate(zip(found.top_ids, found.top_logprobs, strict=True), start=1):
            entry.setdefault(token, Logprob(value, rank, self._token_text(token)))
        return entry

    def _token_text(self, token: int) -> str:
        return self._tokenizer.token_text(token) if self._tokenizer is not None else ""
