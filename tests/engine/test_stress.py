from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from packhorse.engine.sampling_params import SamplingParams
from packhorse.errors import OutOfMemory
from tests.support.stress import Machine, Stress, random_limits, random_machine, random_params, random_prompt

POLICIES = ("continuous", "dynamic", "static")


def random_trouble(rng: random.Random) -> list[Exception | None]:
    """What the runner's next passes raise: out of memory once (halves help) or often, anything else, now or later."""
    later: list[Exception | None] = [None] * rng.choice([0, 0, 1, 3])
    worse = [RuntimeError("broken"), MemoryError()]
    return [*later, *rng.choice([[OutOfMemory("no room")] * rng.choice([1, 2, 2, 4, 9]), [rng.choice(worse)]])]


class EngineMachine(RuleBasedStateMachine):
    """Arrivals, steps, aborts and failures in any order; each request must give what it gives alone."""

    def __init__(self) -> None:
        super().__init__()
        self.stress = Stress(Machine())

    @initialize(seed=st.integers(0, 10_000), policy=st.sampled_from(POLICIES))
    def choose_machine(self, seed: int, policy: str) -> None:
        self.stress = Stress(random_machine(random.Random(seed), policy))

    @rule(seed=st.integers(0, 100_000), stream=st.booleans())
    def submit(self, seed: int, stream: bool) -> None:
        rng = random.Random(seed)
        self.stress.submit(random_prompt(rng), random_params(rng), stream, **random_limits(rng))

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.stress.step()

    @rule(number=st.integers(0, 20))
    def abort(self, number: int) -> None:
        self.stress.abort(f"r{number}")

    @rule(more=st.booleans())
    def announce(self, more: bool) -> None:
        self.stress.engine.more_to_come = more

    @rule(seed=st.integers(0, 1000))
    def trouble(self, seed: int) -> None:
        self.stress.trouble(*random_trouble(random.Random(seed)))

    def teardown(self) -> None:
        self.stress.drain()


EngineMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestEngineUnderAnyLoad = EngineMachine.TestCase

STEPS = 1700
"""Of each of the twelve runs: more than 20,000 in all, each with everything looked at after it."""


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_every_request_under_load_gives_what_it_gives_alone(seed: int, policy: str) -> None:
    rng = random.Random(seed)
    steps = 0
    while steps < STEPS:
        stress = Stress(random_machine(rng, policy), most_sequences=rng.choice([None, None, 1, 2]))
        load(stress, rng, steps=100)
        stress.drain()
        steps += stress.steps


def load(stress: Stress, rng: random.Random, steps: int) -> None:
    stress.engine.more_to_come = rng.random() < 0.5
    most = rng.choice([3, 12, 12, 40])
    troubled = rng.random() < 0.5
    while stress.steps < steps:
        for _ in range(rng.choice([0, 0, 1, 3])):
            if stress.engine.num_unfinished < most:
                stress.submit(random_prompt(rng), random_params(rng), rng.random() < 0.5, **random_limits(rng))
        if rng.random() < 0.05 and stress.requests:
            stress.abort(rng.choice(list(stress.requests)))
        if rng.random() < 0.03:
            stress.engine.more_to_come = not stress.engine.more_to_come
        if troubled and rng.random() < 0.03:
            stress.trouble(*random_trouble(rng))
        for _ in range(rng.randrange(4)):
            stress.step()


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
