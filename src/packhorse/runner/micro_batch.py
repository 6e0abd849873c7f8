"""One step in several passes, so that the memory for activations falls; the results are the same."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from packhorse.errors import OutOfMemory
from packhorse.runner.base import Float32, Runner, StepBatch


class MicroBatchRunner:
    """Runs each step of another runner in `passes` parts of about equal token counts.

        tokens   a0 a1 a2 a3 a4 a5 │ a6 a7 b9 c4 d2 e7      two passes of six tokens
        pass 1   a: context 6      │ pass 2   a: context 8, b, c, d, e

    A part that runs out of memory is halved and tried once more; if that fails too, OutOfMemory is raised.
    """

    def __init__(self, runner: Runner, passes: int) -> None:
        self._runner = runner
        self._passes = passes
        self.halvings = 0

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    @property
    def num_blocks(self) -> int:
        return self._runner.num_blocks

    @property
    def block_size(self) -> int:
        return self._runner.block_size

    def run(self, batch: StepBatch) -> Float32:
        """Logits float32[R, V] of all parts together."""
        size = -(-len(batch.ids) // self._passes)
        return self._or_halved(batch) if size == len(batch.ids) else self._in_parts(batch, size, self._or_halved)

    def _in_parts(self, batch: StepBatch, size: int, run: Callable[[StepBatch], Float32]) -> Float32:
        """Parts of `size` tokens, one after another; their logits are gathered, for a runner reuses its own."""
        logits = np.empty((len(batch.rows), self.vocab_size), dtype=np.float32)
        for begin in range(0, len(batch.ids), size):
            end = min(begin + size, len(batch.ids))
            first, last = np.searchsorted(batch.rows, (begin, end))
            logits[first:last] = run(part(batch, begin, end))
        return logits

    def _or_halved(self, batch: StepBatch) -> Float32:
        try:
            return self._runner.run(batch)
        except OutOfMemory:
            if len(batch.ids) == 1:
                raise
            self.halvings += 1
            return self._in_parts(batch, -(-len(batch.ids) // 2), self._runner.run)


def part(batch: StepBatch, begin: int, end: int) -> StepBatch:
    """Tokens begin … end - 1 of a step as a step. A sequence cut by the end has the context up to there."""
    starts, stops = batch.cu_seqlens[:-1], batch.cu_seqlens[1:]
    inside = (starts < end) & (stops > begin)
    cut_off = np.maximum(stops[inside] - end, 0)
    tokens = np.minimum(stops[inside], end) - np.maximum(starts[inside], begin)
    first, last = np.searchsorted(batch.rows, (begin, end))
    return StepBatch(
        ids=batch.ids[begin:end],
        positions=batch.positions[begin:end],
        slots=batch.slots[begin:end],
        cu_seqlens=np.concatenate([[0], np.cumsum(tokens)]).astype(np.int32),
        context_lens=(batch.context_lens[inside] - cut_off).astype(np.int32),
        block_table=batch.block_table[inside],
        rows=batch.rows[first:last] - begin,
    )
