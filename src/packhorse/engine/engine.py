"""The step loop: requests in, outputs out.

    submit ─► Admission ─► Scheduler ─► prepare ─► Runner ─► sample ─► Scheduler ─► OutputBuilder ─► RequestOutput
                              plan      StepBatch   logits    tokens     append

Whatever a step raises, its requests end with that error and the engine goes on.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from packhorse.config import EngineConfig
from packhorse.engine.adaptive import adaptive_concurrency
from packhorse.engine.admission import Admission, Limits
from packhorse.engine.deadlines import Deadline, Deadlines
from packhorse.engine.logits_processors import process
from packhorse.engine.logprobs import token_logprobs
from packhorse.engine.output_builder import OutputBuilder, RequestState
from packhorse.engine.outputs import FinishReason, RequestOutput
from packhorse.engine.pacing import PrefillPacer
from packhorse.engine.policy import make_policy
from packhorse.engine.request import Request
from packhorse.engine.sampler import SamplingBatch, sample
from packhorse.engine.scheduler import Scheduler, StepPlan
from packhorse.engine.sequence import Sequence
from packhorse.engine.stats import EngineCounters, EngineStats, Outstanding
from packhorse.engine.step import PreparedStep, prepare
from packhorse.engine.table import DIRECT_STOP_IDS
from packhorse.errors import DeadlineExceeded, InvalidRequest, OutOfMemory, PackhorseError, StepError
from packhorse.runner.base import Float32, Int32, Runner
from packhorse.runner.micro_batch import MicroBatchRunner
from packhorse.text.tokenizer import Tokenizer

NOT_FINITE = "The model's logits are not finite numbers for this request."


class Engine:
    """Batched generation with one model. Not thread-safe: one thread calls submit, step and abort.

    clock: seconds, monotonic. context_length: of the model; what is really allowed is `max_model_len`.
    more_to_come: set by who submits while requests keep coming; batches of the static and dynamic policies then wait to
    be full. Without it what is there is started.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        *,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: tuple[int, ...] = (),
        context_length: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        limits = Limits(
            vocab_size=runner.vocab_size,
            context_length=context_length,
            cache_tokens=runner.num_blocks * runner.block_size,
            max_model_len=config.max_model_len,
        )
        self.max_model_len = limits.max_len
        self.vocab_size = runner.vocab_size
        self.more_to_come = False
        self._runner = MicroBatchRunner(runner, config.micro_batch)
        self._clock = clock
        self._admission = Admission(limits, tokenizer, eos_token_ids)
        self._scheduler = Scheduler(
            make_policy(config),
            max_num_seqs=config.max_num_seqs,
            token_budget=config.max_num_batched_tokens,
            max_len=limits.max_len,
            num_blocks=runner.num_blocks,
            block_size=runner.block_size,
            prefix_caching=config.enable_prefix_caching,
            priority_seconds=config.priority_seconds,
        )
        self._adaptive = adaptive_concurrency(config, self._scheduler.concurrency_limit)
        self._pacer = PrefillPacer(config.max_decode_stall) if config.max_decode_stall is not None else None
        self._table = self._scheduler.table
        self._outputs = OutputBuilder(tokenizer, self._table)
        self._states: dict[str, RequestState] = {}
        self._news: dict[str, RequestState] = {}
        self._numbers = itertools.count()
        self._deadlines = Deadlines()
        self._counters = EngineCounters()

    @property
    def num_unfinished(self) -> int:
        """Requests submitted and not yet given back."""
        return len(self._states)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequest or ContextLengthExceeded, at once, for one that can never run."""
        if request.request_id in self._states:
            raise InvalidRequest(f"A request with the id {request.request_id!r} is under way.", param="request_id")
        sequences = self._admission.sequences(request)
        now = self._clock()
        prompt_ids = [int(i) for i in request.prompt_token_ids]
        state = RequestState(request, prompt_ids, sequences, now, number=next(self._numbers))
        self._states[request.request_id] = state
        self._counters.prompt_tokens += len(request.prompt_token_ids)
        for sequence in sequences:
            self._scheduler.add(sequence, now)
        for seconds, queued_only in ((request.timeout, False), (request.queue_timeout, True)):
            if seconds is not None:
                self._deadlines.add(Deadline(request.request_id, state.number, now, queued_only, seconds))

    def abort(self, request_id: str) -> None:
        """End a request wherever it is; what it has goes out with the next step. Unknown ids are ignored."""
        state = self._states.get(request_id)
        for sequence in state.sequences if state else []:
            if not sequence.finished:
                self._finish(sequence, "abort")

    def fail_all(self, error: Exception) -> None:
        """End every request with the error; their outputs come with the next step."""
        self._fail([s for state in self._states.values() for s in state.sequences if not s.finished], error)

    def step(self) -> list[RequestOutput]:
        """Run one step and return the requests that finished in it, and news of streaming ones."""
        begin = self._clock()
        self._expire(begin)
        if self._adaptive is not None:
            self._scheduler.concurrency_limit = self._adaptive.limit
        if self._pacer is not None:
            self._scheduler.prefill_allowance = self._pacer.allowance()
        plan = self._scheduler.schedule(begin, self.more_to_come)
        if plan is not None:
            self._note_first_schedule(plan, begin)
            try:
                prepared = prepare(plan, self._table, self._runner.block_size)
                self._commit(plan, prepared, self._runner.run(prepared.batch))
            except OutOfMemory as error:
                self._make_room(error)
            except Exception as error:
                self._fail(self._table.running(plan.rows), error)
            self._note_duration(plan, self._clock() - begin)
        return self._collect()

    def wake_at(self) -> float:
        """When to call `step` again although nothing is submitted until then: now, a moment, or infinity."""
        policy, waiting, now = self._scheduler.policy, self._scheduler.waiting, self._clock()
        if self._scheduler.running or self._news or policy.next_bucket(waiting, now, self.more_to_come) is not None:
            return now
        return min(policy.wake_at(waiting), self._deadlines.next())

    def stats(self) -> EngineStats:
        """A snapshot."""
        scheduler, counters = self._scheduler, self._counters
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            waiting_tokens=scheduler.waiting.num_tokens,
            concurrency_limit=scheduler.concurrency_limit,
            blocks_used=scheduler.pool.num_used,
            blocks_cached=scheduler.pool.num_cached,
            blocks_total=scheduler.pool.num_blocks,
            prompt_tokens=counters.prompt_tokens,
            computed_tokens=counters.computed_tokens,
            generated_tokens=counters.generated_tokens,
            aborted_tokens=counters.aborted_tokens,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            steps=counters.steps,
            batched_sequences=counters.batched_sequences,
            preemptions=scheduler.num_preemptions,
            finished=dict(counters.finished),
            queue_time=counters.queue_time.snapshot(),
            time_to_first_token=counters.time_to_first_token.snapshot(),
            inter_token_latency=counters.inter_token_latency.snapshot(),
            request_latency=counters.request_latency.snapshot(),
            batch_size=counters.batch_size.snapshot(),
            step_tokens=counters.step_tokens.snapshot(),
            request_prompt=counters.request_prompt.snapshot(),
            request_generated=counters.request_generated.snapshot(),
        )

    def outstanding(self) -> Outstanding:
        """How far the unfinished sequences are."""
        scheduler, table = self._scheduler, self._table
        rows = np.array([s.row for s in scheduler.running], dtype=np.int32)
        waiting = list(scheduler.waiting)
        lengths = [len(s.tokens) for s in waiting]
        held = np.concatenate([table.num_tokens[rows], np.array(lengths, dtype=np.int32)])
        prompts = np.concatenate([table.prompt_len[rows], np.array([s.prompt_len for s in waiting], dtype=np.int32)])
        ends = np.concatenate([table.end[rows], np.array([s.end for s in waiting], dtype=np.int32)])
        return Outstanding(held - prompts, ends - held)

    def forget(self) -> None:
        """Empty the prefix cache and the statistics (after a warm-up, say). Nothing may be under way."""
        self._scheduler.pool.forget()
        self._counters = EngineCounters()
        scheduler = self._scheduler
        scheduler.num_preemptions = scheduler.prefix_queries = scheduler.prefix_hits = 0

    def check_integrity(self) -> None:
        """Raises AssertionError unless blocks, rows, queues and requests agree. Cheap enough for every test step."""
        self._scheduler.check_integrity()
        live = {id(s) for s in (*self._scheduler.running, *self._scheduler.waiting)}
        known = {id(s) for state in self._states.values() for s in state.sequences if not s.finished}
        assert live == known, "the scheduler and the requests do not hold the same sequences"

    def _commit(self, plan: StepPlan, prepared: PreparedStep, logits: Float32) -> None:
        self._scheduler.commit(plan)
        counters = self._counters
        counters.steps += 1
        counters.batched_sequences += len(plan.rows)
        counters.computed_tokens += plan.total_tokens
        counters.batch_size.observe(len(plan.rows))
        counters.step_tokens.observe(plan.total_tokens)
        for row, first, at, count in prepared.prompt_logits:
            self._score_prompt(row, first, logits[at : at + count])
        rows, places = prepared.sampled_rows, prepared.sampled_logits
        if prepared.prompt_logits:  # a request may have failed there, with all its choices
            alive = self._alive(rows)
            rows, places = rows[alive], places[alive]
        if len(rows):
            whole = len(rows) == len(logits)
            self._sample(rows, logits if whole else logits[places])

    def _score_prompt(self, row: int, first: int, logits: Float32) -> None:
        sequence = self._table.sequences[row]
        if sequence is None or sequence.params.prompt_logprobs is None:
            return
        if not np.isfinite(logits.max(axis=1)).all():
            self._fail([sequence], StepError(NOT_FINITE))
            return
        for offset, scores in enumerate(logits):
            following = int(self._table.token_ids[row, first + offset + 1])
            sequence.prompt_logprobs.append(token_logprobs(scores, following, sequence.params.prompt_logprobs))

    def _sample(self, rows: Int32, logits: Float32) -> None:
        """One token for each of `rows` from logits float32[len(rows), V]; then what ends here is ended."""
        table = self._table
        scored = np.flatnonzero(table.scored[rows])
        raw = dict(zip(rows[scored].tolist(), logits[scored], strict=True))  # copies: what follows changes them
        for i in np.flatnonzero(table.processed[rows]).tolist():
            self._process_logits(int(rows[i]), logits[i])
        tokens, usable = sample(logits, self._sampling_batch(rows))
        if not usable.all():
            self._fail(table.running(rows[~usable]), StepError(NOT_FINITE))
            alive = self._alive(rows)
            rows, tokens = rows[alive], tokens[alive]
        self._finish_scoring_only(rows)
        growing = table.num_tokens[rows] < table.end[rows]
        if not growing.all():
            rows, tokens = rows[growing], tokens[growing]
        self._scheduler.append(rows, tokens)
        self._counters.generated_tokens += len(rows)
        self._note_tokens(rows)
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True) if raw else ():
            if row in raw:
                self._score(row, token, raw[row])
        stopped = table.stopped(rows, tokens)
        self._follow(rows, tokens, stopped)
        self._finish_ended(rows, tokens, stopped)

    def _alive(self, rows: Int32) -> npt.NDArray[np.bool_]:
        """Which of `rows` still have a sequence: when one fails, the other choices of its request go with it."""
        return np.array([self._table.sequences[row] is not None for row in rows.tolist()], dtype=np.bool_)

    def _sampling_batch(self, rows: Int32) -> SamplingBatch:
        table = self._table
        return SamplingBatch(
            temperature=table.temperature[rows],
            top_k=table.top_k[rows],
            top_p=table.top_p[rows],
            min_p=table.min_p[rows],
            keys=table.key[rows],
            positions=(table.num_tokens[rows] - table.prompt_len[rows]).astype(np.uint64),
        )

    def _process_logits(self, row: int, logits: Float32) -> None:
        sequence = self._table.sequences[row]
        if sequence is None:
            return
        tokens = self._table.token_ids[row, : self._table.num_tokens[row]]
        prompt, output = tokens[: sequence.prompt_len], tokens[sequence.prompt_len :]
        process(logits, sequence.params, prompt, output, sequence.stop_ids)

    def _score(self, row: int, token: int, logits: Float32) -> None:
        sequence = self._table.sequences[row]
        if sequence is None or sequence.params.logprobs is None:
            return
        sequence.logprobs.append(token_logprobs(logits, token, sequence.params.logprobs))
        sequence.offsets.append(sequence.text.decoded if sequence.text is not None else 0)

    def _follow(self, rows: Int32, tokens: Int32, stopped: npt.NDArray[np.bool_]) -> None:
        """What only some sequences need after each token: text, more stop ids than the table holds, news.

        One loop without calls of our own but the text's: with 256 streams each microsecond here is a quarter of a
        millisecond of every step.
        """
        table = self._table
        followed = np.flatnonzero(table.followed[rows])
        if not len(followed):
            return
        chosen = rows[followed]
        generated = (table.num_tokens[chosen] - table.prompt_len[chosen]).tolist()
        facts = zip(chosen.tolist(), tokens[followed].tolist(), stopped[followed].tolist(), generated, strict=True)
        for row, token, ended, count in facts:
            sequence = table.sequences[row]
            if sequence is None:
                continue
            if ended or (len(sequence.stop_ids) > DIRECT_STOP_IDS and token in sequence.stop_ids):
                self._finish(sequence, "stop", token)
                continue
            text = sequence.text
            if text is not None and text.push(token, stops_active=count > sequence.params.min_tokens):
                self._finish(sequence, "stop", text.matched)
            elif sequence.stream:
                self._news[sequence.request_id] = self._states[sequence.request_id]

    def _finish_ended(self, rows: Int32, tokens: Int32, stopped: npt.NDArray[np.bool_]) -> None:
        table = self._table
        full = table.num_tokens[rows] >= table.end[rows]
        for i in np.flatnonzero(stopped | full).tolist():
            sequence = table.sequences[int(rows[i])]
            if sequence is None:  # ended in _follow already
                continue
            if stopped[i]:
                self._finish(sequence, "stop", int(tokens[i]))
            else:
                self._finish(sequence, "length")

    def _finish_scoring_only(self, rows: Int32) -> None:
        """Sequences that may not grow (max_tokens 0, or a prompt that fills the context) end with their prompt."""
        table = self._table
        for sequence in table.running(rows[table.num_tokens[rows] >= table.end[rows]]):
            self._finish(sequence, "length")

    def _finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        self._scheduler.remove(sequence)
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        if sequence.text is not None:
            enough = len(sequence.output_ids()) > sequence.params.min_tokens
            sequence.text.finish(stops_active=enough and reason in ("stop", "length"))
            if sequence.text.matched is not None and reason == "length":
                sequence.finish_reason, sequence.stop_reason = "stop", sequence.text.matched
        state = self._states[sequence.request_id]
        state.unfinished -= 1
        self._news[sequence.request_id] = state

    def _fail(self, sequences: list[Sequence], error: Exception) -> None:
        """End the requests of these sequences, all their choices, with the error."""
        failure = _as_failure(error)
        failure.__cause__ = error if failure is not error else error.__cause__
        for request_id in dict.fromkeys(s.request_id for s in sequences):
            state = self._states[request_id]
            state.error = failure
            for sequence in state.sequences:
                if not sequence.finished:
                    self._finish(sequence, "error")

    def _make_room(self, error: OutOfMemory) -> None:
        """The step did not fit, not even in halves: it runs again without its least urgent sequence."""
        if self._scheduler.make_room() is None:
            self._fail(list(self._scheduler.running), error)

    def _expire(self, now: float) -> None:
        """End requests whose deadline has passed."""
        for deadline in self._deadlines.passed(now):
            state = self._states.get(deadline.request_id)
            if state is None or state.number != deadline.number or state.finished:
                continue
            if deadline.queued_only and state.first_scheduled_time is not None:
                continue
            where = "in the queue" if state.first_scheduled_time is None else "running"
            message = f"The request ran out of its {deadline.seconds:g} s while it was {where}."
            self._fail([s for s in state.sequences if not s.finished], DeadlineExceeded(message))

    def _note_duration(self, plan: StepPlan, seconds: float) -> None:
        """Tell who adjusts to them how long the step took."""
        if self._adaptive is not None:
            self._adaptive.step(seconds, demand=self._at_limit())
        if self._pacer is not None:
            decoding = int(np.count_nonzero(plan.num_tokens == 1))
            self._pacer.step(seconds, decode_tokens=decoding, prefill_tokens=plan.total_tokens - decoding)

    def _at_limit(self) -> bool:
        scheduler = self._scheduler
        return bool(len(scheduler.waiting)) and len(scheduler.running) >= scheduler.concurrency_limit

    def _collect(self) -> list[RequestOutput]:
        news, self._news = self._news, {}
        now = self._clock()
        outputs = []
        for request_id, state in news.items():
            if state.finished:
                del self._states[request_id]
                self._count_finished(state, now)
            if state.finished or state.request.stream:
                output = self._output_of(state, now)
                if output is not None:
                    outputs.append(output)
        return outputs

    def _output_of(self, state: RequestState, now: float) -> RequestOutput | None:
        """The request's output; should it be impossible to make, that is this request's error and nobody else's."""
        try:
            return self._outputs.build(state, now)
        except Exception as error:
            failure = StepError(f"The output of the request could not be made: {error!r}.")
            if not state.finished:
                self._fail([s for s in state.sequences if not s.finished], failure)
                return None  # it comes with the next step
            request = state.request
            return RequestOutput(request.request_id, request.prompt, state.prompt_ids, [], finished=True, error=failure)

    def _count_finished(self, state: RequestState, now: float) -> None:
        counters, reasons = self._counters, [s.finish_reason for s in state.sequences]
        reason = "error" if state.error is not None else "abort" if "abort" in reasons else reasons[0]
        counters.finished[str(reason)] += 1
        counters.request_latency.observe(now - state.arrival_time)
        generated = sum(len(s.output_ids()) for s in state.sequences)
        counters.request_prompt.observe(len(state.prompt_ids))
        counters.request_generated.observe(generated)
        if reason in ("error", "abort"):
            counters.aborted_tokens += generated

    def _note_first_schedule(self, plan: StepPlan, now: float) -> None:
        fresh = plan.rows[self._table.num_tokens[plan.rows] == self._table.prompt_len[plan.rows]]
        for sequence in self._table.running(fresh):
            state = self._states[sequence.request_id]
            if state.first_scheduled_time is None:
                state.first_scheduled_time = now
                self._counters.queue_time.observe(now - state.arrival_time)

    def _note_tokens(self, rows: Int32) -> None:
        """Moments of the tokens that `rows` just got."""
        table, now = self._table, self._clock()
        first = table.num_tokens[rows] == table.prompt_len[rows] + 1
        later = rows[~first]
        if len(later):
            self._counters.inter_token_latency.observe(now - table.last_token_time[later])
        table.last_token_time[rows] = now
        for sequence in table.running(rows[first]):
            state = self._states[sequence.request_id]
            if state.first_token_time is None:
                state.first_token_time = now
                self._counters.time_to_first_token.observe(now - state.arrival_time)
                if self._adaptive is not None and state.first_scheduled_time is not None:
                    self._adaptive.first_token(now - state.first_scheduled_time)


def _as_failure(error: Exception) -> PackhorseError:
    """An error of a step as its requests carry it."""
    if isinstance(error, PackhorseError):
        return error
    if isinstance(error, MemoryError):  # beside the runner, which has its own way to say so
        return OutOfMemory(f"A step needs more memory than there is: {error!r}.")
    return StepError(f"A step failed: {error!r}.")
