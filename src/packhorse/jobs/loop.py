"""The running job: read, submit, step, append, until nothing is left.

A bounded number of requests is in flight, so memory does not grow with the file. A result is written in the moment its
line is done; nothing else is kept of it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packhorse.api.requests import ApiRequest
from packhorse.api.responses import response_body, usage
from packhorse.engine.outputs import RequestOutput
from packhorse.errors import JobError, PackhorseError
from packhorse.jobs.inputs import Entry
from packhorse.jobs.journal import Journal
from packhorse.jobs.line_requests import CustomId
from packhorse.jobs.prepare import FailedLine, PreparedLine, Preparer
from packhorse.jobs.records import error_record, request_id, success_record
from packhorse.jobs.tally import Tally

if TYPE_CHECKING:
    from packhorse.config import EngineConfig
    from packhorse.engine.engine import Engine
    from packhorse.text.tokenizer import Tokenizer


def window_for(config: EngineConfig) -> int:
    """Requests to keep in flight: what runs and as much again to choose from, and a batch in each length bucket."""
    from packhorse.engine.policy import make_policy

    batches = config.batch_size * make_policy(config).num_buckets if config.policy != "continuous" else 0
    return max(2 * config.max_num_seqs, 2 * config.batch_size, config.max_num_seqs + batches)


@dataclass(slots=True)
class _Pending:
    """A line in flight. outputs: by prompt, None until it is finished. error: of the first prompt that failed."""

    line: int
    custom_id: CustomId
    request: ApiRequest
    submitted_at: float
    outputs: list[RequestOutput | None]
    unfinished: int
    error: PackhorseError | None = None


class JobLoop:
    """Runs entries through the engine into the journal.

    window: requests in flight at most, as long as each line has one prompt. between_steps: called after every step
    (and for every line that fails before one); it may raise to stop the loop. wall: seconds since 1970.
    latencies: seconds from submission to the last token, a line each.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        tokenizer: Tokenizer,
        model_name: str,
        preparer: Preparer,
        journal: Journal,
        tally: Tally,
        window: int,
        clock: Callable[[], float],
        wall: Callable[[], float],
        between_steps: Callable[[], None],
    ) -> None:
        self.latencies = array("d")
        self._engine = engine
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._preparer = preparer
        self._journal = journal
        self._tally = tally
        self._window = window
        self._clock = clock
        self._wall = wall
        self._between_steps = between_steps
        self._in_flight: dict[str, tuple[_Pending, int]] = {}

    def run(self, entries: Iterator[Entry]) -> None:
        """Until every entry has its record. Raises JobError when results cannot be written."""
        try:
            while (more := self._fill(entries)) or self._in_flight:
                for output in self._step(more):
                    self._take(output)
                if self._in_flight and not self._engine.num_unfinished:
                    raise JobError("The engine lost requests: run the same command again, and please report this.")
                self._between_steps()
        finally:
            self._engine.more_to_come = False
            self._abandon()

    def _step(self, more: bool) -> list[RequestOutput]:
        """One step, in which a policy may wait for fuller batches as long as there are more lines.

        But not when nothing runs: the window is full, so that nothing will come until something has run. What waits is
        started then, which spares the time and never hangs, however small the window.
        """
        self._engine.more_to_come = more
        outputs = self._engine.step()
        if more and not outputs and not self._engine.stats().num_running:
            self._engine.more_to_come = False
            outputs = self._engine.step()
        return outputs

    def _fill(self, entries: Iterator[Entry]) -> bool:
        """Submit lines while there is room; whether there may be more."""
        while self._engine.num_unfinished < self._window:
            entry = next(entries, None)
            if entry is None:
                return False
            if not self._tally.is_done(entry.line):
                self._admit(entry)
        return True

    def _admit(self, entry: Entry) -> None:
        prepared = self._preparer.prepare(entry)
        failed = prepared if isinstance(prepared, FailedLine) else self._submit(prepared)
        if failed is not None:
            self._write_error(failed)
            self._between_steps()

    def _submit(self, prepared: PreparedLine) -> FailedLine | None:
        """All the line's requests, or none of them when one is refused."""
        count = len(prepared.engine_requests)
        pending = _Pending(
            prepared.line, prepared.custom_id, prepared.request, self._clock(), [None] * count, unfinished=count
        )
        for place, request in enumerate(prepared.engine_requests):
            try:
                self._engine.submit(request)
            except PackhorseError as error:
                for earlier in prepared.engine_requests[:place]:
                    del self._in_flight[earlier.request_id]
                    self._engine.abort(earlier.request_id)
                return FailedLine(prepared.line, prepared.custom_id, error, asked=True)
            self._in_flight[request.request_id] = (pending, place)
        return None

    def _take(self, output: RequestOutput) -> None:
        """A request is finished (or was aborted because its line had failed: then nobody waits for it)."""
        found = self._in_flight.pop(output.request_id, None) if output.finished else None
        if found is None:
            return
        pending, place = found
        pending.outputs[place] = output
        pending.unfinished -= 1
        if output.error is not None and pending.error is None:
            pending.error = output.error
            for other, (line, _) in list(self._in_flight.items()):
                if line is pending:
                    self._engine.abort(other)
        if not pending.unfinished:
            self._write(pending)

    def _write(self, pending: _Pending) -> None:
        self.latencies.append(self._clock() - pending.submitted_at)
        if pending.error is not None:
            self._write_error(FailedLine(pending.line, pending.custom_id, pending.error, asked=True))
            return
        outputs = [output for output in pending.outputs if output is not None]
        job_id = self._preparer.job_id
        body = response_body(
            pending.request,
            outputs,
            request_id=request_id(job_id, pending.line),
            model=self._model_name,
            created=int(self._wall()),
            tokenizer=self._tokenizer,
        )
        self._journal.append(success_record(job_id, pending.line, pending.custom_id, body))
        tokens = usage(outputs)
        self._tally.count(pending.line, True, tokens["prompt_tokens"], tokens["completion_tokens"])

    def _write_error(self, failed: FailedLine) -> None:
        job_id = self._preparer.job_id
        self._journal.append(error_record(job_id, failed.line, failed.custom_id, failed.error, asked=failed.asked))
        self._tally.count(failed.line, False)

    def _abandon(self) -> None:
        """Stopped half-way: leave an engine that may go on, with this job or another."""
        if not self._in_flight:
            return
        for name in self._in_flight:
            self._engine.abort(name)
        self._in_flight.clear()
        self._engine.step()  # gives back what was aborted
