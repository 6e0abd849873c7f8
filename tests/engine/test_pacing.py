"""Prompts are computed in chunks small enough for the sequences that decode beside them."""

from __future__ import annotations

import pytest

from packhorse.config import EngineConfig
from packhorse.engine.engine import Engine
from packhorse.engine.pacing import LEAST_TOKENS
from packhorse.runner.base import Float32, StepBatch
from tests.support.engines import VOCAB, request
from tests.support.scripted import FakeClock, ScriptedRunner, hashed


class TimedRunner(ScriptedRunner):
    """A machine whose step takes a fixed time and some more for each token."""

    def __init__(self, clock: FakeClock, *, fixed: float, per_token: float) -> None:
        super().__init__(hashed(VOCAB), vocab_size=VOCAB, num_blocks=512)
        self.keep_batches = True
        self._clock, self._fixed, self._per_token = clock, fixed, per_token

    def run(self, batch: StepBatch) -> Float32:
        self._clock.advance(self._fixed + self._per_token * len(batch.ids))
        return super().run(batch)


def longest_and_usual_step(max_decode_stall: float | None, per_token: float) -> tuple[float, float, int]:
    """Seconds of the longest step while a 2,000-token prompt comes, of a step before it, and how many steps it took."""
    clock = FakeClock()
    runner = TimedRunner(clock, fixed=0.02, per_token=per_token)
    config = EngineConfig(max_decode_stall=max_decode_stall)
    engine = Engine(runner, config, context_length=4096, clock=clock)
    for number in range(4):
        engine.submit(request(str(number), [number + 1] * 8, max_tokens=1500))
    # Streams decode, and a short prompt comes by, from which the pacer learns what a prefill token costs.
    for _ in range(10):
        engine.step()
    engine.submit(request("short", list(range(40)), max_tokens=1))
    usual = 0.0
    for _ in range(10):
        begin = clock.now
        engine.step()
        usual = clock.now - begin
    engine.submit(request("long", [(7 * i) % VOCAB for i in range(2000)], max_tokens=1))
    longest, steps, finished = 0.0, 0, False
    while not finished:
        begin = clock.now
        finished = any(output.request_id == "long" for output in engine.step())
        longest, steps = max(longest, clock.now - begin), steps + 1
    return longest, usual, steps


@pytest.mark.parametrize("per_token", [0.0002, 0.001, 0.01])
def test_a_long_prompt_stalls_decoding_at_most_as_much_as_allowed(per_token: float) -> None:
    longest, usual, _ = longest_and_usual_step(2.0, per_token)
    # A prompt always gets LEAST_TOKENS, or it would never end.
    assert longest <= max(2.0 * usual, usual + LEAST_TOKENS * per_token) * 1.01


def test_without_a_limit_a_prompt_takes_the_whole_token_budget() -> None:
    longest, usual, steps = longest_and_usual_step(None, 0.001)
    assert longest > 5 * usual
    assert steps <= 4


def test_a_looser_limit_gives_the_prompt_more_tokens_a_step() -> None:
    assert longest_and_usual_step(4.0, 0.001)[2] < longest_and_usual_step(2.0, 0.001)[2]
