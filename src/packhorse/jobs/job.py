"""One job from beginning to end: what it is, where it stands, what is left to do."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from packhorse.errors import JobError
from packhorse.jobs.files import JobFiles, exclusive, job_files
from packhorse.jobs.finish import finish
from packhorse.jobs.identity import JobIdentity, write_sidecar
from packhorse.jobs.inputs import Entry, InputFile, InputFormat, open_input
from packhorse.jobs.journal import cut_torn_tail, open_journal
from packhorse.jobs.loop import JobLoop
from packhorse.jobs.prepare import Preparer
from packhorse.jobs.report import JobReport, OnProgress, Watch
from packhorse.jobs.signals import NoSignals
from packhorse.jobs.spool import adopt, drop_new, is_stream, spool
from packhorse.jobs.standing import Standing, discard, reopen, standing, tidy
from packhorse.jobs.strict import refuse_bad_lines
from packhorse.jobs.survey import fingerprint, survey
from packhorse.jobs.tally import Tally, tally_file

if TYPE_CHECKING:
    from packhorse.engine.engine import Engine
    from packhorse.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What to run. input: None is standard input.

    column, chat: see InputFile. defaults: sampling fields of simple lines. result_settings: of the engine, those that
    change results, by name. window: requests in flight. sort: put results into the order of the input.
    restart: throw earlier results away. retry_errors: run lines again that failed in an earlier start.
    """

    input: Path | None
    output: Path
    format: InputFormat | None = None
    column: str | None = None
    chat: bool = False
    defaults: dict[str, Any] = field(default_factory=dict)
    result_settings: dict[str, Any] = field(default_factory=dict)
    window: int = 128
    strict: bool = False
    strict_fields: bool = False
    sort: bool = True
    restart: bool = False
    retry_errors: bool = False


@dataclass(frozen=True, slots=True)
class JobModel:
    """The model of a job, found but not loaded yet. names: what lines may call it, `name` among them."""

    name: str
    identity: str
    names: frozenset[str]
    load: Callable[[], tuple[Engine, Tokenizer]]


class _Stopped(Exception):
    """A signal came."""


def run_job(
    spec: JobSpec,
    find_model: Callable[[], JobModel],
    *,
    on_progress: OnProgress = lambda _: None,
    signals: NoSignals | None = None,
    stdin: BinaryIO | None = None,
    clock: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
) -> JobReport:
    """Run a job, or the rest of it, and report.

    find_model: called once the input was found readable. signals: entered while the job runs; its `signum` stops it.
    clock: seconds, monotonic. wall: seconds since 1970. Raises JobError, ConfigError, and what find_model and loading
    raise, when the job cannot run or go on; finished results are kept.
    """
    streamed = spec.input is None or is_stream(spec.input)
    files = job_files(spec.output, None if streamed else spec.input)
    with exclusive(files):
        try:
            path = spool(spec.input, stdin or sys.stdin.buffer, files) if streamed else spec.input
            assert path is not None
            source = open_input(path, format=spec.format, column=spec.column, chat=spec.chat)
            return _Job(spec, files, source, on_progress, signals or NoSignals(), clock, wall).run(find_model)
        except OSError as error:
            place = f"{error.filename}: " if error.filename else ""
            raise JobError(
                f"{place}{error.strerror or error}. Finished results are kept: mend it and run the same command again."
            ) from error
        finally:
            drop_new(files)


class _Job:
    """Steps of one start, in order; each needs what the ones before it found out."""

    def __init__(
        self,
        spec: JobSpec,
        files: JobFiles,
        source: InputFile,
        on_progress: OnProgress,
        signals: NoSignals,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._spec = spec
        self._files = files
        self._source = source
        self._signals = signals
        self._clock = clock
        self._wall = wall
        self._watch = Watch(on_progress, clock)

    def run(self, find_model: Callable[[], JobModel]) -> JobReport:
        self._watch.stage("reading")
        self._survey = survey(self._source)
        self._watch.stage("loading", total=self._survey.records)
        self._model = find_model()
        self._identity = self._make_identity()
        found = standing(self._files, self._identity, restart=self._spec.restart)
        if found is Standing.COMPLETE:
            tidy(self._files)
            tally = self._complete_tally()
            if not (self._spec.retry_errors and tally.failed):
                return self._watch.report(self._spec.output, tally, already_complete=True)
            reopen(self._files)
        self._resume(found)
        return self._finish_it(found)

    def _make_identity(self) -> JobIdentity:
        spec = self._spec
        settings = {
            "format": self._source.format,
            "column": spec.column,
            "chat": spec.chat or None,
            "strict_fields": spec.strict_fields or None,
            "served_model_names": sorted(self._model.names),
            **spec.result_settings,
            **spec.defaults,
        }
        given = {name: value for name, value in settings.items() if value is not None}
        return JobIdentity(self._survey.sha256, self._model.name, self._model.identity, given)

    def _complete_tally(self) -> Tally:
        tally, _ = tally_file(self._files.output, self._identity.job_id, self._survey.last_line)
        self._watch.begin(tally, self._survey.records)
        if tally.done != self._survey.records:
            raise JobError(
                f"{self._files.output} should hold the results of {self._survey.records} lines, and {tally.done} are "
                "there: it was changed. Choose another output, or give --restart to make it anew."
            )
        return tally

    def _resume(self, found: Standing) -> None:
        """Count what is done, and cut off what is torn."""
        self._tally = Tally(self._survey.last_line)
        if found is not Standing.NEW:
            last_line = self._survey.last_line
            self._tally, end = tally_file(self._files.partial, self._identity.job_id, last_line)
            torn = cut_torn_tail(self._files.partial, end)
            if torn:
                self._watch.note(f"{torn} bytes of an unfinished record were cut off; its line runs again.")
        if self._spec.retry_errors and self._tally.failed:
            self._watch.note(f"{self._tally.reopen_failed()} failed lines run again.")
        self._watch.begin(self._tally, self._survey.records)

    def _finish_it(self, found: Standing) -> JobReport:
        """Run what is left, then put the output in its place."""
        loaded = self._model.load() if self._tally.done < self._survey.records else None
        with self._signals:
            try:
                if loaded is not None:
                    self._answer(*loaded, found)
                self._watch.stage("sorting")
                finish(
                    self._files,
                    self._identity.job_id,
                    records=self._survey.records,
                    last_line=self._survey.last_line,
                    sort=self._spec.sort,
                    check=self._check,
                )
                self._files.spool.unlink(missing_ok=True)
            except _Stopped:
                return self._watch.report(self._spec.output, self._tally, stopped_by=self._signals.signum)
        return self._watch.report(self._spec.output, self._tally)

    def _answer(self, engine: Engine, tokenizer: Tokenizer, found: Standing) -> None:
        """Every line that has no result yet gets one."""
        preparer = Preparer(
            job_id=self._identity.job_id,
            tokenizer=tokenizer,
            names=self._model.names,
            duplicates=self._survey.duplicates,
            defaults=self._spec.defaults,
            strict_fields=self._spec.strict_fields,
        )
        if self._spec.strict:
            self._watch.stage("checking")
            refuse_bad_lines(self._entries(), replace(preparer, unknown_fields={}), engine, self._check)
        self._begin(found)
        with closing(open_journal(self._files.partial, self._clock)) as journal:

            def between_steps() -> None:
                journal.sync_if_due()
                if self._watch.tick(engine):
                    self._check_input()
                self._check()

            loop = JobLoop(
                engine=engine,
                tokenizer=tokenizer,
                model_name=self._model.name,
                preparer=preparer,
                journal=journal,
                tally=self._tally,
                window=self._spec.window,
                clock=self._clock,
                wall=self._wall,
                between_steps=between_steps,
            )
            self._watch.start(engine)
            try:
                loop.run(self._entries())
            finally:
                self._watch.stop(engine, loop.latencies, preparer.unknown_fields.values())
                journal.sync()

    def _begin(self, found: Standing) -> None:
        """From here on the job exists on disk."""
        if found is Standing.NEW:
            discard(self._files)
        name = "standard input" if self._spec.input is None else self._spec.input.name
        self._source = replace(self._source, path=adopt(self._source.path, self._files))
        if found is Standing.NEW:
            records = self._survey.records
            write_sidecar(self._files.sidecar, self._identity, input_name=name, records=records)

    def _entries(self) -> Iterator[Entry]:
        """The entries that the survey saw. Raises JobError when the file is no longer the same."""
        for entry in self._source.entries():
            if entry.line > self._survey.last_line:
                break
            yield entry
        self._check_input()

    def _check_input(self) -> None:
        if fingerprint(self._source.path) != self._survey.fingerprint:
            raise JobError(
                f"{self._source.path} changed while the job ran. Put it back as it was and run the same command again, "
                "or begin anew with --restart."
            )

    def _check(self) -> None:
        if self._signals.signum is not None:
            raise _Stopped
