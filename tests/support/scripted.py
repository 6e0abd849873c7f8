"""A runner without a model: the next token is a function of the whole context, read through a real paged cache.

A wrong block, slot, position or length changes the context that it reads, hence the tokens that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from packhorse.runner.base import Float32, StepBatch

NextToken = Callable[[tuple[int, ...]], int]


def hashed(vocab_size: int, *, avoid: Sequence[int] = ()) -> NextToken:
    """Next token from a hash of every token before it."""
    allowed = [i for i in range(vocab_size) if i not in avoid]

    def following(context: tuple[int, ...]) -> int:
        state = 1469598103934665603
        for token in context:
            state = ((state ^ (token + 1)) * 1099511628211) & 0xFFFFFFFFFFFFFFFF
        return allowed[(state >> 17) % len(allowed)]

    return following


def scripts(lines: dict[tuple[int, ...], Sequence[int]], then: int = 0) -> NextToken:
    """After each prompt its own list of ids, then `then` for ever."""

    def following(context: tuple[int, ...]) -> int:
        for prompt, line in lines.items():
            if context[: len(prompt)] == prompt:
                done = len(context) - len(prompt)
                return line[done] if done < len(line) else then
        return then

    return following


class ScriptedRunner:
    """Implements Runner over `following`. `before_step(n)` is called before step n and may raise.

    The logits are 10 for the chosen token and, for the others, small values that differ by context, so that sampling
    at a temperature has something to choose from.
    """

    def __init__(
        self,
        following: NextToken,
        *,
        vocab_size: int,
        num_blocks: int = 64,
        block_size: int = 16,
        before_step: Callable[[int], None] | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.batches: list[StepBatch] = []
        self.keep_batches = False
        self.steps = 0
        self._following = following
        self._before_step = before_step
        self._cache = np.full(num_blocks * block_size, -1, dtype=np.int64)
        self._positions = np.full(num_blocks * block_size, -1, dtype=np.int64)

    def run(self, batch: StepBatch) -> Float32:
        if self._before_step is not None:
            self._before_step(self.steps)
        self.steps += 1
        if self.keep_batches:
            self.batches.append(batch)
        last = batch.positions[batch.cu_seqlens[1:] - 1]
        assert np.array_equal(last + 1, batch.context_lens), "a context does not end with its last token"
        self._cache[batch.slots] = batch.ids
        self._positions[batch.slots] = batch.positions
        sequence_of = np.repeat(np.arange(len(batch.context_lens)), np.diff(batch.cu_seqlens))
        logits = np.zeros((len(batch.rows), self.vocab_size), dtype=np.float32)
        for i, token in enumerate(batch.rows.tolist()):
            context = self._context(batch, int(sequence_of[token]), int(batch.positions[token]) + 1)
            self._fill(logits[i], context)
        return logits

    def _context(self, batch: StepBatch, sequence: int, length: int) -> tuple[int, ...]:
        assert length <= batch.context_lens[sequence]
        places = np.arange(length)
        slots = batch.block_table[sequence, places // self.block_size].astype(np.int64) * self.block_size
        slots += places % self.block_size
        assert np.array_equal(self._positions[slots], places), "a block holds another sequence's tokens"
        return tuple(self._cache[slots].tolist())

    def _fill(self, row: Float32, context: tuple[int, ...]) -> None:
        chosen = self._following(context)
        row[:] = np.sin(np.arange(self.vocab_size) * (1.0 + sum(context) % 7) + len(context))
        row[chosen] = 10.0


class PoisonedRunner(ScriptedRunner):
    """Gives logits that are no numbers after some contexts."""

    poisoned: Callable[[tuple[int, ...]], bool] = staticmethod(lambda _: False)

    def _fill(self, row: Float32, context: tuple[int, ...]) -> None:
        super()._fill(row, context)
        if self.poisoned(context):
            row[5] = np.nan


class FakeClock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
