"""A step in several passes gives what it gives in one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.engine.engine import Engine
from packhorse.errors import OutOfMemory
from packhorse.runner.base import StepBatch
from packhorse.runner.micro_batch import MicroBatchRunner, part
from tests.support.engines import finish_all, request, runner_of, scripted_engine
from tests.support.scripted import ScriptedRunner, hashed

VOCAB = 31
SIZE = 4


def runner(before_step: Callable[[int], None] | None = None) -> ScriptedRunner:
    made = ScriptedRunner(hashed(VOCAB), vocab_size=VOCAB, num_blocks=200, block_size=SIZE, before_step=before_step)
    made.keep_batches = True
    return made


def batch_of(sequences: list[tuple[int, int]], wanted: list[bool], seed: int = 0) -> tuple[StepBatch, StepBatch | None]:
    """A step of (tokens computed before, tokens now), and the step that computed those before, if any.

    wanted: of each token whether it needs logits, repeated as often as needed. Blocks are dealt out in random order.
    """
    rng = np.random.default_rng(seed)
    before = np.array([first for first, _ in sequences])
    counts = np.array([count for _, count in sequences])
    width = int(-(-(before + counts).max() // SIZE))
    table = rng.permutation(200)[: width * len(sequences)].reshape(len(sequences), width).astype(np.int32)
    token = rng.integers(0, VOCAB, size=(len(sequences), width * SIZE))

    def step(begins: Any, lengths: Any, rows: Any) -> StepBatch:
        owner = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.concatenate([np.arange(b, b + n) for b, n in zip(begins, lengths, strict=True)]).astype(np.int64)
        return StepBatch(
            ids=token[owner, positions].astype(np.int64),
            positions=positions,
            slots=table[owner, positions // SIZE].astype(np.int64) * SIZE + positions % SIZE,
            cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            context_lens=(begins + lengths).astype(np.int32),
            block_table=table,
            rows=rows,
        )

    rows = np.flatnonzero(np.resize(wanted, counts.sum()))
    earlier = step(np.zeros_like(before), before, np.zeros(0, dtype=np.int64)) if before.all() else None
    if earlier is None:
        before[:] = 0
    return step(before, counts, rows), earlier


SEQUENCES = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12)), min_size=1, max_size=8)
WANTED = st.lists(st.booleans(), min_size=1, max_size=40)


@given(sequences=SEQUENCES, wanted=WANTED, passes=st.integers(1, 60), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=150)
def test_any_number_of_passes_gives_the_logits_of_one(
    sequences: list[tuple[int, int]], wanted: list[bool], passes: int, seed: int
) -> None:
    batch, earlier = batch_of(sequences, wanted, seed)
    found = []
    for number in (1, passes):
        inner = runner()
        split = MicroBatchRunner(inner, number)
        if earlier is not None:
            inner.run(earlier)
        inner.batches.clear()
        found.append(split.run(batch).copy())
        size = -(-len(batch.ids) // number)
        assert [len(b.ids) for b in inner.batches[:-1]] == [size] * (len(inner.batches) - 1)
        assert sum(len(b.ids) for b in inner.batches) == len(batch.ids)
        assert len(inner.batches) <= number
    assert found[0].shape == (len(batch.rows), VOCAB)
    assert np.array_equal(found[0], found[1])


@given(sequences=SEQUENCES, wanted=WANTED, cuts=st.tuples(st.integers(0, 95), st.integers(1, 96)))
@settings(deadline=None, max_examples=150)
def test_a_part_of_a_step_is_a_step(
    sequences: list[tuple[int, int]], wanted: list[bool], cuts: tuple[int, int]
) -> None:
    batch, _ = batch_of(sequences, wanted)
    begin = min(cuts[0], len(batch.ids) - 1)
    end = min(max(cuts[1], begin + 1), len(batch.ids))
    found = part(batch, begin, end)
    lengths = np.diff(found.cu_seqlens)
    assert (lengths > 0).all()
    assert found.cu_seqlens[-1] == len(found.ids) == len(found.positions) == len(found.slots) == end - begin
    assert len(lengths) == len(found.context_lens) == len(found.block_table)
    for s, length in enumerate(lengths):
        last = found.cu_seqlens[s + 1] - 1
        assert found.positions[last] == found.context_lens[s] - 1
        positions = found.positions[last - length + 1 : last + 1]
        assert np.array_equal(positions, np.arange(found.context_lens[s] - length, found.context_lens[s]))
        slots = found.block_table[s, positions // SIZE].astype(np.int64) * SIZE + positions % SIZE
        assert np.array_equal(found.slots[last - length + 1 : last + 1], slots)
    assert np.array_equal(found.rows + begin, batch.rows[(batch.rows >= begin) & (batch.rows < end)])
    for field in fields(StepBatch):
        assert getattr(found, field.name).dtype == getattr(batch, field.name).dtype


def test_a_sequence_cut_in_two_sees_its_first_half_from_the_second() -> None:
    batch, _ = batch_of([(0, 10), (0, 2)], [False] * 9 + [True, False, True])
    inner = runner()
    MicroBatchRunner(inner, 2).run(batch)
    assert [b.cu_seqlens.tolist() for b in inner.batches] == [[0, 6], [0, 4, 6]]
    assert [b.context_lens.tolist() for b in inner.batches] == [[6], [10, 2]]
    assert [b.rows.tolist() for b in inner.batches] == [[], [3, 5]]


def test_logits_of_a_pass_outlive_the_next_pass() -> None:
    """A runner's logits are valid until its next call only."""

    class Reusing(ScriptedRunner):
        buffer = np.zeros((64, VOCAB), dtype=np.float32)

        def run(self, batch: StepBatch) -> Any:
            self.buffer[: len(batch.rows)] = super().run(batch)
            return self.buffer[: len(batch.rows)]

    batch, _ = batch_of([(0, 5), (0, 4), (0, 1)], [True])
    inner = Reusing(hashed(VOCAB), vocab_size=VOCAB, num_blocks=200, block_size=SIZE)
    assert np.array_equal(MicroBatchRunner(inner, 4).run(batch), runner().run(batch))


# Out of memory


def limited(inner: ScriptedRunner, tokens: int, passes: int = 1) -> tuple[MicroBatchRunner, list[int]]:
    """A runner that has no memory for more tokens at once, and the sizes it was called with."""
    run, tried = inner.run, []

    def refuse(batch: StepBatch) -> Any:
        tried.append(len(batch.ids))
        if len(batch.ids) > tokens:
            raise OutOfMemory(f"{len(batch.ids)} tokens")
        return run(batch)

    inner.run = refuse  # type: ignore[method-assign]
    return MicroBatchRunner(inner, passes), tried


@pytest.mark.parametrize(
    ("limit", "passes", "calls"),
    [(12, 1, [12]), (11, 1, [12, 6, 6]), (6, 1, [12, 6, 6]), (4, 2, [6, 3, 3, 6, 3, 3]), (6, 2, [6, 6])],
)
def test_a_pass_out_of_memory_is_halved_once_and_gives_the_same(limit: int, passes: int, calls: list[int]) -> None:
    batch, _ = batch_of([(0, 7), (0, 5)], [True, False])
    split, tried = limited(runner(), limit, passes)
    assert np.array_equal(split.run(batch), runner().run(batch))
    assert tried == calls
    assert split.halvings == calls.count(12) * (limit < 12) + calls.count(6) * (limit < 6)


def test_a_half_that_is_out_of_memory_too_raises() -> None:
    batch, _ = batch_of([(0, 7), (0, 5)], [True])
    split, tried = limited(runner(), 5)
    with pytest.raises(OutOfMemory, match="6 tokens"):
        split.run(batch)
    assert tried == [12, 6]


def test_one_token_cannot_be_halved() -> None:
    batch, _ = batch_of([(0, 1)], [True])
    split, tried = limited(runner(), 0)
    with pytest.raises(OutOfMemory):
        split.run(batch)
    assert tried == [1]


def test_another_error_is_not_tried_again() -> None:
    def broken(_: int) -> None:
        raise RuntimeError("broken")

    inner = runner(broken)
    batch, _ = batch_of([(0, 7)], [True])
    with pytest.raises(RuntimeError, match="broken"):
        MicroBatchRunner(inner, 2).run(batch)
    assert inner.steps == 0


# The engine over it


def limited_engine(tokens: int, **config: Any) -> tuple[Engine, list[int]]:
    engine = scripted_engine(**config)
    return engine, limited(runner_of(engine), tokens)[1]


def answers(engine: Engine, prompts: dict[str, list[int]]) -> dict[str, Any]:
    for name, prompt in prompts.items():
        engine.submit(request(name, prompt, max_tokens=6, logprobs=2, prompt_logprobs=1))
    return finish_all(engine, max_steps=1000)


PROMPTS = {str(number): [(number * 7 + i * i) % 97 for i in range(3 + 9 * number)] for number in range(5)}


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("budget", [16, 512])
def test_micro_batches_change_no_answer(micro_batch: int, budget: int) -> None:
    expected = answers(scripted_engine(), PROMPTS)
    engine = scripted_engine(micro_batch=micro_batch, max_num_batched_tokens=budget)
    inner = runner_of(engine)
    found = answers(engine, PROMPTS)
    for name in PROMPTS:
        assert found[name].outputs == expected[name].outputs
        assert found[name].prompt_logprobs == expected[name].prompt_logprobs
    assert max(len(batch.ids) for batch in inner.batches) <= -(-min(budget, 105) // micro_batch)


def test_the_least_urgent_goes_back_when_halves_do_not_help_and_all_are_served() -> None:
    expected = answers(scripted_engine(), PROMPTS)
    engine, tried = limited_engine(22)  # all prompts together have 105 tokens, the longest 39
    found = answers(engine, PROMPTS)
    assert engine.stats().preemptions > 0
    assert max(tried) > 44
    for name in PROMPTS:
        assert found[name].error is None
        assert found[name].outputs == expected[name].outputs
    assert found["0"].metrics.num_preemptions == 0


def test_the_only_one_that_does_not_fit_fails_and_the_engine_lives_on() -> None:
    expected = answers(scripted_engine(), PROMPTS)
    engine, _ = limited_engine(10)
    found = answers(engine, PROMPTS)
    for name, prompt in PROMPTS.items():
        if len(prompt) > 20:
            assert isinstance(found[name].error, OutOfMemory)
            assert (found[name].error.code, found[name].error.status) == ("out_of_memory", 503)
        else:
            assert found[name].outputs == expected[name].outputs
    assert engine.stats().blocks_used == 0
    assert answers(engine, {"after": [1, 2, 3]})["after"].error is None


def test_a_memory_that_recovers_is_used_again() -> None:
    engine, _ = limited_engine(1 << 30, max_num_seqs=4)
    for number in range(4):
        engine.submit(request(str(number), [number], max_tokens=400))
    engine.step()
    inner = runner_of(engine)
    run, failures = inner.run, [OutOfMemory("no"), OutOfMemory("no")]

    def once(batch: StepBatch) -> Any:
        if failures:
            raise failures.pop()
        return run(batch)

    inner.run = once  # type: ignore[method-assign]
    engine.step()
    for _ in range(50):
        engine.step()
        assert engine.stats().num_running == 3
    for _ in range(50):
        engine.step()
    assert engine.stats().num_running == 4
