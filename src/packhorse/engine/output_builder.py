"""From a request's sequences to what its caller sees: what is new since the caller was told last."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from packhorse.engine.logprobs import TokenLogprobs
from packhorse.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from packhorse.engine.request import Request
from packhorse.engine.sequence import NOT_RUNNING, Sequence
from packhorse.engine.table import SequenceTable
from packhorse.errors import PackhorseError
from packhorse.text.tokenizer import Tokenizer


@dataclass(eq=False, slots=True)
class RequestState:
    """A request under way: its sequences (one for n greedy choices, else n), moments and error.

    prompt_ids: the prompt as plain integers. number: of its arrival, never given again, unlike its id. unfinished:
    sequences that have not ended. told: an output of it was given out.
    """

    request: Request
    prompt_ids: list[int]
    sequences: list[Sequence]
    arrival_time: float
    number: int = 0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    error: PackhorseError | None = None
    unfinished: int = field(init=False)
    told: bool = False

    def __post_init__(self) -> None:
        self.unfinished = len(self.sequences)

    @property
    def finished(self) -> bool:
        return not self.unfinished


class OutputBuilder:
    """Makes RequestOutputs; keeps nothing but the tokenizer (None: no text) and where running tokens are.

    What a request was told stands in its sequences. One that does not stream is told everything at its end.
    """

    def __init__(self, tokenizer: Tokenizer | None, table: SequenceTable) -> None:
        self._tokenizer = tokenizer
        self._table = table

    def build(self, state: RequestState, now: float) -> RequestOutput | None:
        """What is new of the request, with every choice that has news; None when nothing is."""
        finished = not state.unfinished
        news = [choice for sequence in state.sequences if (choice := self._choice(sequence)) is not None]
        if not news and not finished:
            return None
        request = state.request
        if len(state.sequences) < request.params.n:  # greedy: computed once
            news = [replace(choice, index=i) for choice in news for i in range(request.params.n)]
        prompt_logprobs = None if state.told else self._prompt_logprobs(state)
        state.told = True
        metrics = self._metrics(state, now) if finished else None
        return RequestOutput(
            request.request_id,
            request.prompt,
            state.prompt_ids,
            news,
            finished,
            prompt_logprobs,
            state.error,
            metrics,
        )

    def _choice(self, sequence: Sequence) -> CompletionOutput | None:
        """What is new of a choice; None when nothing is."""
        first, stream = sequence.told, sequence.text
        ids = self._new_ids(sequence)
        text = stream.take() if stream is not None else self._decoded(sequence, ids)
        reason = sequence.finish_reason
        if not (ids or text or (reason is not None and not sequence.told_end)):
            return None
        sequence.told += len(ids)
        sequence.told_end = reason is not None
        if sequence.params.logprobs is None:
            return CompletionOutput(sequence.index, text, ids, None, None, reason, sequence.stop_reason)
        logprobs = [self._entry(found) for found in sequence.logprobs[first : sequence.told]]
        offsets = self._offsets(sequence, first)
        return CompletionOutput(sequence.index, text, ids, logprobs, offsets, reason, sequence.stop_reason)

    def _new_ids(self, sequence: Sequence) -> list[int]:
        """Generated tokens that the caller does not know; beside log-probabilities those whose place is certain."""
        row, begin = sequence.row, sequence.prompt_len + sequence.told
        ids: list[int] = (
            sequence.tokens[begin:].tolist()
            if row == NOT_RUNNING
            else self._table.token_ids[row, begin : self._table.num_tokens[row]].tolist()
        )
        if sequence.params.logprobs is None or sequence.text is None or sequence.finished:
            return ids
        # A stop string that ends the text before a token's first character moves its offset to that end.
        certain = sequence.text.released
        return [token for token, at in zip(ids, sequence.offsets[sequence.told :], strict=True) if at <= certain]

    def _decoded(self, sequence: Sequence, ids: list[int]) -> str:
        """Text of a choice that nobody followed: all at once, at its end."""
        if self._tokenizer is None:
            return ""
        shown = ids[:-1] if isinstance(sequence.stop_reason, int) else ids
        return self._tokenizer.decode(shown, sequence.params.skip_special_tokens)

    def _offsets(self, sequence: Sequence, first: int) -> list[int]:
        """Where each token's first character stands; what a stop string cut off points to the end of the text."""
        if sequence.text is None:
            return [0] * (sequence.told - first)
        return [min(at, sequence.text.released) for at in sequence.offsets[first : sequence.told]]

    def _metrics(self, state: RequestState, now: float) -> RequestMetrics:
        return RequestMetrics(
            arrival_time=state.arrival_time,
            first_scheduled_time=state.first_scheduled_time,
            first_token_time=state.first_token_time,
            finished_time=now,
            num_preemptions=sum(s.num_preemptions for s in state.sequences),
        )

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
