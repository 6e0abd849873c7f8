"""An engine under random load, with everything that must hold looked at after each step."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from packhorse.config import EngineConfig
from packhorse.engine.block_pool import ROOT
from packhorse.engine.engine import Engine
from packhorse.engine.outputs import CompletionOutput, RequestOutput
from packhorse.engine.request import Request
from packhorse.engine.sampling_params import SamplingParams
from packhorse.errors import ContextLengthExceeded
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
    """What the request gives by itself, in a cache that is large enough, in one piece."""
    engine, _ = replace(Machine(), max_model_len=max_len).engine()
    engine.submit(request)
    while True:
        for output in engine.step():
            if output.finished:
                return output


def random_machine(rng: random.Random) -> Machine:
    return Machine(
        num_blocks=rng.choice([2, 3, 5, 8, 13, 40]),
        block_size=rng.choice([1, 2, 4, 8]),
        max_num_seqs=rng.choice([1, 2, 3, 8, 64]),
        max_num_batched_tokens=rng.choice([1, 2, 3, 7, 16, 64]),
        max_model_len=rng.choice([None, None, 20]),
    )


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
    """An engine, and what its requests should give."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.clock = FakeClock()
        self.engine, self.runner = machine.engine(self.clock)
        self.runner.keep_batches = True
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.shown: dict[str, RequestOutput] = {}
        self.finished: dict[str, RequestOutput] = {}
        self.steps = 0

    def submit(self, prompt: list[int], params: SamplingParams, stream: bool) -> None:
        request = Request(f"r{len(self.requests)}", prompt, params, stream=stream)
        if len(prompt) > self.machine.max_len:
            with pytest.raises(ContextLengthExceeded, match=f"has {len(prompt)} tokens and at most"):
                self.engine.submit(request)
        else:
            self.engine.submit(request)
            self.requests[request.request_id] = request
        self.engine.check_integrity()

    def abort(self, request_id: str) -> None:
        if request_id not in self.finished:
            self.aborted.add(request_id)
        self.engine.abort(request_id)
        self.engine.check_integrity()

    def step(self) -> None:
        before = self.engine.stats()
        scheduler = self.engine._scheduler
        oldest = scheduler.running[0] if scheduler.running else None
        self.clock.advance(1.0)
        outputs = self.engine.step()
        self.steps += 1
        self.engine.check_integrity()
        after = self.engine.stats()
        assert oldest is None or oldest.finished or oldest in scheduler.running, "the oldest sequence was preempted"
        if before.num_running or before.num_waiting:
            assert after.computed_tokens > before.computed_tokens, "a step did nothing although work waits"
        self._look_at_batch()
        for output in outputs:
            self._look_at(output)

    def drain(self) -> None:
        """Step until all is done, and compare with what each request gives alone."""
        limit = self.steps + 40 + sum(self._most_steps(request) for request in self.requests.values())
        while self.engine.num_unfinished:
            assert self.steps < limit, "requests do not finish"
            self.step()
        stats = self.engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.blocks_used, stats.failed_requests) == (0, 0, 0, 0)
        assert set(self.finished) == set(self.requests)
        assert stats.preemptions <= stats.generated_tokens, "preemptions are not bounded by progress"
        for request_id, output in self.finished.items():
            self._compare(output, alone(self.requests[request_id], self.machine.max_len))

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
        assert output.error is None
        assert request.stream or output.finished
        assert [choice.index for choice in output.outputs] == list(range(request.params.n))
        earlier = self.shown.get(output.request_id)
        if earlier is not None:
            for old, new in zip(earlier.outputs, output.outputs, strict=True):
                assert_grew(old, new)
        self.shown[output.request_id] = output
        if output.finished:
            assert all(choice.finish_reason is not None for choice in output.outputs)
            self.finished[output.request_id] = output

    def _compare(self, found: RequestOutput, expected: RequestOutput) -> None:
        if found.request_id not in self.aborted:
            assert found.outputs == expected.outputs
            assert found.prompt_logprobs == expected.prompt_logprobs
            return
        for choice, whole in zip(found.outputs, expected.outputs, strict=True):
            if choice.finish_reason == "abort":
                assert choice.token_ids == whole.token_ids[: len(choice.token_ids)]
            else:
                assert choice == whole


def assert_grew(old: CompletionOutput, new: CompletionOutput) -> None:
    """What was shown is not changed, only added to."""
    assert new.token_ids[: len(old.token_ids)] == old.token_ids
    assert new.text.startswith(old.text)
    assert (new.logprobs or [])[: len(old.logprobs or [])] == (old.logprobs or [])
    if old.finish_reason is not None:
        assert old == new


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
