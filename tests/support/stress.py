"""An engine under random load, with everything that must hold looked at after each step."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from packhorse.config import EngineConfig
from packhorse.engine.block_pool import ROOT
from packhorse.engine.engine import Engine
from packhorse.engine.outputs import RequestOutput, joined
from packhorse.engine.request import Request
from packhorse.engine.sampling_params import SamplingParams
from packhorse.errors import ContextLengthExceeded, DeadlineExceeded, OutOfMemory, StepError
from packhorse.runner.base import Float32, StepBatch
from packhorse.text.tokenizer import Tokenizer
from tests.support.engines import runner_of
from tests.support.scripted import FakeClock, ScriptedRunner, hashed
from tests.support.tokenizers import small_tokenizer

EOS = 2


@cache
def tokenizer() -> Tokenizer:
    return small_tokenizer()


@dataclass(frozen=True)
class Machine:
    """What an engine has to work with."""

    num_blocks: int = 512
    block_size: int = 4
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 4096
    max_model_len: int | None = None
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def max_len(self) -> int:
        return min(self.num_blocks * self.block_size, self.max_model_len or 1 << 30)

    def engine(self, clock: FakeClock | None = None) -> tuple[Engine, ScriptedRunner]:
        vocab_size = tokenizer().vocab_size
        runner = ScriptedRunner(
            hashed(vocab_size), vocab_size=vocab_size, num_blocks=self.num_blocks, block_size=self.block_size
        )
        config = EngineConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            **dict(self.settings),
        )
        engine = Engine(
            runner,
            config,
            tokenizer=tokenizer(),
            eos_token_ids=(EOS,),
            context_length=1 << 20,
            clock=clock or FakeClock(),
        )
        return engine, runner


def alone(request: Request, max_len: int) -> RequestOutput:
    """What the request gives by itself and at once, in a cache that is large enough and knows nothing, in one piece."""
    engine, _ = Machine(max_model_len=max_len, settings=(("enable_prefix_caching", False),)).engine()
    engine.submit(replace(request, stream=False, timeout=None, queue_timeout=None))
    while True:
        for output in engine.step():
            if output.finished:
                return output


def random_machine(rng: random.Random, policy: str = "continuous") -> Machine:
    max_num_seqs = rng.choice([1, 2, 3, 8, 64])
    settings: dict[str, Any] = {
        "policy": policy,
        "batch_size": rng.randint(1, min(8, max_num_seqs)),
        "max_wait_ms": rng.choice([0, 3000, 20_000]),
        "length_buckets": rng.choice([None, (), (12,), (6, 12, 20)]),
        "micro_batch": rng.choice([1, 1, 2, 3, 4]),
        "enable_prefix_caching": rng.random() < 0.7,
        "priority_seconds": rng.choice([1, 10]),
        "target_itl_ms": rng.choice([None, None, 900, 1100]),  # every step takes 1 s: always missed, or never
    }
    return Machine(
        num_blocks=rng.choice([2, 3, 5, 8, 13, 40]),
        block_size=rng.choice([1, 2, 4, 8]),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.choice([1, 2, 3, 7, 16, 64]),
        max_model_len=rng.choice([None, None, 20]),
        settings=tuple(settings.items()),
    )


def random_prompt(rng: random.Random) -> list[int]:
    """One of three beginnings, or none, and a few tokens of its own."""
    vocab_size = tokenizer().vocab_size
    length = rng.choice([1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 30])
    beginning = random.Random(rng.randrange(3))
    shared = [beginning.randrange(vocab_size) for _ in range(rng.choice([0, 0, 3, 4, 7, 8, 12, 16, 17]))]
    return (shared + [rng.randrange(vocab_size) for _ in range(length)])[: max(length, len(shared))]


def random_limits(rng: random.Random) -> dict[str, Any]:
    """Priority and deadlines of a request, mostly usual ones."""
    return {
        "priority": rng.choice([0, 0, 0, -1, 1, 5, -100]),
        "timeout": rng.choice([None] * 8 + [3.0, 15.0]),
        "queue_timeout": rng.choice([None] * 8 + [3.0, 15.0]),
    }


def random_params(rng: random.Random) -> SamplingParams:
    """Anything that a request may ask for, seeded, so that it has one right answer."""
    some: dict[str, Any] = {"seed": rng.randrange(1 << 40), "temperature": rng.choice([0.0, 0.0, 1.0, 8.0])}
    some["max_tokens"] = rng.choice([1, 2, 3, 5, 9, 17, None])
    offers: dict[str, Any] = {
        "n": rng.choice([2, 3]),
        "top_k": rng.choice([1, 5, 50]),
        "top_p": rng.choice([0.1, 0.9]),
        "min_p": 0.05,
        "repetition_penalty": 1.3,
        "frequency_penalty": rng.choice([-0.5, 1.05]),
        "presence_penalty": 0.5,
        "logit_bias": {rng.randrange(400): rng.choice([-100, 9.5])},
        "stop": rng.sample(["a", "e", "th", "你", "\ufffd", " "], 2),
        "stop_token_ids": rng.sample(range(400), rng.choice([1, 12, 60])),
        "min_tokens": 1 if some["max_tokens"] == 1 else 2,
        "ignore_eos": True,
        "logprobs": rng.choice([0, 3]),
        "prompt_logprobs": rng.choice([0, 2]),
        "echo": True,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    for name in rng.sample(sorted(offers), rng.choice([0, 1, 1, 2, 4, 8])):
        some[name] = offers[name]
    if rng.random() < 0.05:
        some |= {"max_tokens": 0, "min_tokens": 0, "prompt_logprobs": 1}
    return SamplingParams(**some)


class Stress:
    """An engine, and what its requests should give. most_sequences: a pass of more is out of memory."""

    def __init__(self, machine: Machine, most_sequences: int | None = None) -> None:
        self.machine = machine
        self.most_sequences = most_sequences
        self.clock = FakeClock()
        self.engine, self.runner = machine.engine(self.clock)
        self.runner.keep_batches = True
        self.runner._before_step = self._before_pass
        self.runner.run = self._in_memory(self.runner.run)  # type: ignore[method-assign]
        self.requests: dict[str, Request] = {}
        self.arrivals: dict[str, float] = {}
        self.aborted: set[str] = set()
        self.news: dict[str, list[RequestOutput]] = {}
        self.finished: dict[str, RequestOutput] = {}
        self.troubles: list[Exception | None] = []
        self.raised = self.steps = 0

    def submit(self, prompt: list[int], params: SamplingParams, stream: bool, **limits: Any) -> None:
        request = Request(f"r{len(self.requests)}", prompt, params, stream=stream, **limits)
        if len(prompt) > self.machine.max_len:
            with pytest.raises(ContextLengthExceeded, match=f"has {len(prompt)} tokens and at most"):
                self.engine.submit(request)
        else:
            self.engine.submit(request)
            self.requests[request.request_id] = request
            self.arrivals[request.request_id] = self.clock.now
        self.engine.check_integrity()

    def abort(self, request_id: str) -> None:
        if request_id not in self.finished:
            self.aborted.add(request_id)
        self.engine.abort(request_id)
        self.engine.check_integrity()

    def trouble(self, *passes: Exception | None) -> None:
        """What the next passes of the runner raise; None for nothing."""
        self.troubles = list(passes)

    def step(self) -> None:
        before, raised = self.engine.stats(), self.raised
        scheduler = self.engine._scheduler
        oldest = scheduler.running[0] if scheduler.running else None
        self.clock.advance(1.0)
        due = self.engine.wake_at() <= self.clock.now < self.engine._deadlines.next()
        outputs = self.engine.step()
        self.steps += 1
        self.engine.check_integrity()
        assert_known_blocks_hold_their_tokens(self.engine)
        after = self.engine.stats()
        if oldest is not None and not oldest.finished and oldest not in scheduler.running:
            # A more urgent one entered in the step that then was too large.
            assert self.raised > raised, "the most urgent sequence was preempted"
            assert scheduler.running[0].order < oldest.order, "the most urgent sequence was preempted"
        moved = after.computed_tokens > before.computed_tokens or bool(outputs) or self.raised > raised
        assert moved or not (before.num_running or before.num_waiting) or self._may_hold_back(), "work waits"
        assert moved or not due, "it was called for nothing"
        self._look_at_batch()
        for output in outputs:
            self._look_at(output)
        self._look_for_the_overdue()

    def drain(self) -> None:
        """Step until all is done, and compare with what each request gives alone."""
        self.engine.more_to_come = False
        self.troubles.clear()
        limit = self.steps + 40 + sum(self._most_steps(request) for request in self.requests.values())
        while self.engine.num_unfinished:
            assert self.steps < limit, "requests do not finish"
            self.step()
        stats = self.engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.waiting_tokens, stats.blocks_used) == (0, 0, 0, 0)
        assert self.engine._table.num_free_rows == len(self.engine._table.sequences)
        assert set(self.finished) == set(self.requests)
        assert stats.failed_requests == sum(output.error is not None for output in self.finished.values())
        assert sum(stats.finished.values()) == len(self.requests)
        assert stats.preemptions <= stats.generated_tokens + self.raised, "preemptions are not bounded by progress"
        for request_id, output in self.finished.items():
            self._compare(output, alone(self.requests[request_id], self.machine.max_len))

    def _in_memory(self, run: Callable[[StepBatch], Float32]) -> Callable[[StepBatch], Float32]:
        def limited(batch: StepBatch) -> Float32:
            if self.most_sequences is not None and len(batch.context_lens) > self.most_sequences:
                self.raised += 1
                raise OutOfMemory("no room for so many")
            return run(batch)

        return limited

    def _before_pass(self, _: int) -> None:
        error = self.troubles.pop(0) if self.troubles else None
        if error is not None:
            self.raised += 1
            raise error

    def _may_hold_back(self) -> bool:
        """Whether the policy rightly keeps all that waits: more is to come, no batch is full and no wait is over."""
        scheduler, settings = self.engine._scheduler, dict(self.machine.settings)
        waiting = list(scheduler.waiting)
        if not self.engine.more_to_come or settings["policy"] == "continuous" or scheduler.running:
            return False
        most = max(Counter(s.bucket for s in waiting).values(), default=0)
        waited = self.clock.now - min((s.arrival_time for s in waiting), default=self.clock.now)
        limit = settings["max_wait_ms"] / 1000 if settings["policy"] == "dynamic" else math.inf
        return most < settings["batch_size"] and waited < limit

    def _look_for_the_overdue(self) -> None:
        for request_id, state in self.engine._states.items():
            waited = self.clock.now - self.arrivals[request_id]
            assert waited < (state.request.timeout or math.inf), "it runs beyond its deadline"
            if state.first_scheduled_time is None:
                assert waited < (state.request.queue_timeout or math.inf), "it waits beyond its deadline"

    def _most_steps(self, request: Request) -> int:
        """Steps a request takes when nothing else moves: a token at a time, computed again at each preemption."""
        return 4 * request.params.n * self.machine.max_len

    def _look_at_batch(self) -> None:
        for batch in self.runner.batches:
            assert len(batch.ids) <= self.machine.max_num_batched_tokens
            assert len(batch.context_lens) <= self.machine.max_num_seqs
            assert (np.diff(batch.cu_seqlens) >= 1).all(), "a sequence without a token is in the step"
        self.runner.batches.clear()

    def _look_at(self, output: RequestOutput) -> None:
        request = self.requests[output.request_id]
        assert output.request_id not in self.finished, "a request came back twice"
        self._look_at_error(request, output)
        assert request.stream or output.finished
        news = self.news.setdefault(output.request_id, [])
        assert_adds(news, output)
        news.append(output)
        if output.finished:
            whole = joined(news)
            assert [choice.index for choice in whole.outputs] == list(range(request.params.n))
            assert all(choice.finish_reason is not None for choice in whole.outputs)
            self.finished[output.request_id] = whole

    def _look_at_error(self, request: Request, output: RequestOutput) -> None:
        if isinstance(output.error, DeadlineExceeded):
            limit = min(request.timeout or math.inf, request.queue_timeout or math.inf)
            assert self.clock.now >= self.arrivals[request.request_id] + limit
        elif output.error is not None:
            assert isinstance(output.error, StepError)
            assert self.raised, "a request failed although nothing went wrong"

    def _compare(self, found: RequestOutput, expected: RequestOutput) -> None:
        if found.request_id not in self.aborted and found.error is None:
            assert found.outputs == expected.outputs
            assert found.prompt_logprobs == expected.prompt_logprobs
            return
        for choice, whole in zip(found.outputs, expected.outputs, strict=True):
            if choice.finish_reason in ("abort", "error"):
                assert choice.token_ids == whole.token_ids[: len(choice.token_ids)]
            else:
                assert choice == whole


def assert_adds(earlier: list[RequestOutput], output: RequestOutput) -> None:
    """An output tells something new, and nothing of a choice that has ended or of a prompt that was told."""
    ended = {choice.index for told in earlier for choice in told.outputs if choice.finish_reason is not None}
    assert not ended & {choice.index for choice in output.outputs}
    assert output.finished or output.outputs
    for choice in output.outputs:
        assert choice.token_ids or choice.text or choice.finish_reason is not None
        lists = [choice.token_ids, choice.logprobs, choice.text_offsets]
        assert len({len(some) for some in lists if some is not None}) == 1
    if output.prompt_logprobs is not None:
        assert not earlier


def assert_known_blocks_hold_their_tokens(engine: Engine) -> None:
    """What the prefix cache would serve is in the cache's memory, at the right positions."""
    pool, runner = engine._scheduler.pool, runner_of(engine)
    size = runner.block_size
    held = runner._cache.reshape(-1, size), runner._positions.reshape(-1, size)
    depths = {ROOT: 0}
    for block, (parent, tokens) in sorted(pool._key_of.items(), key=lambda entry: pool._identity[entry[0]]):
        assert held[0][block].tolist() == np.frombuffer(tokens, dtype=np.int32).tolist()
        begin = depths.get(parent)
        if begin is not None:  # its parent may be gone
            assert held[1][block].tolist() == list(range(begin, begin + size))
            depths[pool._identity[block]] = begin + size
