from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from packhorse.engine.sampling_params import SamplingParams
from tests.support.stress import Machine, Stress, random_machine, random_params, tokenizer


def random_prompt(rng: random.Random) -> list[int]:
    length = rng.choice([1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 30])
    return [rng.randrange(tokenizer().vocab_size) for _ in range(length)]


class EngineMachine(RuleBasedStateMachine):
    """Arrivals, steps and aborts in any order; each request must give what it gives alone."""

    def __init__(self) -> None:
        super().__init__()
        self.stress = Stress(Machine())

    @initialize(seed=st.integers(0, 10_000))
    def choose_machine(self, seed: int) -> None:
        self.stress = Stress(random_machine(random.Random(seed)))

    @rule(seed=st.integers(0, 100_000), stream=st.booleans())
    def submit(self, seed: int, stream: bool) -> None:
        rng = random.Random(seed)
        self.stress.submit(random_prompt(rng), random_params(rng), stream)

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.stress.step()

    @rule(number=st.integers(0, 20))
    def abort(self, number: int) -> None:
        self.stress.abort(f"r{number}")

    def teardown(self) -> None:
        self.stress.drain()


EngineMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestEngineUnderAnyLoad = EngineMachine.TestCase


@pytest.mark.parametrize("seed", range(12))
def test_every_request_under_load_gives_what_it_gives_alone(seed: int) -> None:
    rng = random.Random(seed)
    stress = Stress(random_machine(rng))
    while stress.steps < 300:
        for _ in range(rng.choice([0, 0, 1, 3])):
            if stress.engine.num_unfinished < 12:
                stress.submit(random_prompt(rng), random_params(rng), rng.random() < 0.5)
        if rng.random() < 0.05 and stress.requests:
            stress.abort(rng.choice(list(stress.requests)))
        for _ in range(rng.randrange(4)):
            stress.step()
    stress.drain()


@pytest.mark.parametrize("seed", range(8))
def test_many_preemptions_leave_every_answer_as_it_is(seed: int) -> None:
    """A cache for hardly two sequences, eight of them at once."""
    rng = random.Random(seed)
    stress = Stress(Machine(num_blocks=9, block_size=4, max_num_batched_tokens=rng.choice([8, 11, 64])))
    for number in range(8):
        prompt = [rng.randrange(400) for _ in range(rng.randrange(1, 10))]
        settings = {"temperature": rng.choice([0.0, 4.0]), "seed": number, "logprobs": 1, "prompt_logprobs": 1}
        stress.submit(prompt, SamplingParams(max_tokens=20, ignore_eos=True, **settings), stream=True)
    stress.drain()
    assert stress.engine.stats().preemptions > 5
