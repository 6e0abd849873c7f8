"""Which sequences run in a step, and for how many tokens: continuous batching.

    submit ─► waiting (first come, first served) ─► running ─► finished
                  ▲                                    │
                  └──────── preempted (newest) ◄───────┘   when no block is free: its blocks go, its tokens stay

Order of a step: every decoding sequence gets its one token, what is left of the token budget goes to prefills in
chunks, oldest first, and what is left then admits waiting sequences.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from packhorse.engine.block_pool import BlockPool
from packhorse.engine.sequence import NOT_RUNNING, Sequence, blocks_for
from packhorse.engine.table import SequenceTable
from packhorse.runner.base import Int32


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes. rows: int32[S], rows of the table. num_tokens: int32[S] ≥ 1, how many tokens of each."""

    rows: Int32
    num_tokens: Int32

    @property
    def total_tokens(self) -> int:
        return int(self.num_tokens.sum())


class Scheduler:
    """Three verbs: schedule, preempt (inside it), commit. Owns the waiting queue, the running list and the blocks."""

    def __init__(self, *, max_num_seqs: int, token_budget: int, max_len: int, num_blocks: int, block_size: int) -> None:
        # A step must be able to give every running sequence a token.
        self.table = SequenceTable(min(max_num_seqs, token_budget), max_len, block_size)
        self.pool = BlockPool(num_blocks)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._token_budget = token_budget
        self._block_size = block_size
        self._rows: Int32 | None = None

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can run (then nothing waits either)."""
        rows = self._running_rows()
        counts = self._share_budget(rows)
        rows, counts, preempted = self._secure_blocks(rows, counts)
        if not preempted:
            rows, counts = self._admit(rows, counts)
        scheduled = counts > 0
        if not scheduled.all():
            rows, counts = rows[scheduled], counts[scheduled]
        return StepPlan(rows, counts) if len(rows) else None

    def commit(self, plan: StepPlan) -> None:
        """The step has run: its tokens' keys and values are in the cache."""
        self.table.num_computed[plan.rows] += plan.num_tokens

    def append(self, rows: Int32, tokens: Int32) -> None:
        """Add one sampled token to each of `rows`."""
        table = self.table
        table.token_ids[rows, table.num_tokens[rows]] = tokens
        table.num_tokens[rows] += 1

    def remove(self, sequence: Sequence) -> None:
        """The sequence is done, failed or aborted, wherever it is: its blocks and its row are free again."""
        if sequence.row == NOT_RUNNING:
            self.waiting.remove(sequence)
        else:
            self._stop_running(sequence)

    def check_integrity(self) -> None:
        """Raises AssertionError unless blocks, rows and queues agree with each other."""
        self.pool.check_integrity()
        owners = np.zeros(self.pool.num_blocks, dtype=np.int32)
        for sequence in self.running:
            row = sequence.row
            assert self.table.sequences[row] is sequence, "a running sequence does not own its row"
            assert not sequence.finished, "a finished sequence still runs"
            held, computed = int(self.table.num_blocks[row]), int(self.table.num_computed[row])
            assert held * self._block_size >= computed, "computed tokens have no block"
            assert computed < self.table.num_tokens[row] <= self.table.end[row], "token counts contradict each other"
            np.add.at(owners, self.table.blocks_of(row), 1)
        assert np.array_equal(owners, self.pool.owners), "block owners do not match the block tables"
        assert len(self.running) + self.table.num_free_rows == len(self.table.sequences), "a row is lost"
        assert all(s.row == NOT_RUNNING and not s.finished for s in self.waiting), "a waiting sequence holds a row"

    def _running_rows(self) -> Int32:
        if self._rows is None:
            self._rows = np.array([s.row for s in self.running], dtype=np.int32)
        return self._rows

    def _share_budget(self, rows: Int32) -> Int32:
        """int32[S]: a token for each decoding sequence, then chunks for the others in order of age."""
        wanted = self.table.num_tokens[rows] - self.table.num_computed[rows]
        prefilling = wanted > 1
        if not prefilling.any():
            return wanted
        left = self._token_budget - int(np.count_nonzero(~prefilling))
        ahead = np.cumsum(wanted * prefilling) - wanted
        return np.where(prefilling, np.clip(left - ahead, 0, wanted), 1).astype(np.int32)

    def _secure_blocks(self, rows: Int32, counts: Int32) -> tuple[Int32, Int32, bool]:
        """Give the rows the blocks that their tokens need; where there are too few, the newest sequences go back."""
        missing = self._missing_blocks(rows, counts)
        preempted = False
        while int(missing.sum()) > self.pool.num_free:
            self._preempt_newest()
            rows, counts, missing = rows[:-1], counts[:-1], missing[:-1]
            preempted = True
        for i in np.flatnonzero(missing).tolist():
            self._grow(int(rows[i]), int(missing[i]))
        return rows, counts, preempted

    def _missing_blocks(self, rows: Int32, counts: Int32) -> Int32:
        table = self.table
        needed = blocks_for(table.num_computed[rows] + counts, self._block_size)
        return np.maximum(needed - table.num_blocks[rows], 0).astype(np.int32)

    def _grow(self, row: int, count: int) -> None:
        held = int(self.table.num_blocks[row])
        self.table.block_table[row, held : held + count] = self.pool.allocate(count)
        self.table.num_blocks[row] += count

    def _preempt_newest(self) -> None:
        """Recompute preemption. Running is in order of arrival, and what it holds came before all that waits."""
        if len(self.running) < 2:
            raise RuntimeError("the oldest sequence does not fit the cache; it should have been refused on arrival")
        sequence = self.running[-1]
        self._stop_running(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(sequence)

    def _stop_running(self, sequence: Sequence) -> None:
        self.pool.release(self.table.blocks_of(sequence.row))
        self.table.leave(sequence)
        self.running.remove(sequence)
        self._rows = None

    def _admit(self, rows: Int32, counts: Int32) -> tuple[Int32, Int32]:
        """Let waiting sequences in while rows, token budget and blocks allow."""
        left = self._token_budget - int(counts.sum())
        if not (left and self.waiting and self.table.num_free_rows):
            return rows, counts
        spare = self._spare_blocks()
        new_rows: list[int] = []
        new_counts: list[int] = []
        while self.waiting and left and self.table.num_free_rows:
            sequence = self.waiting[0]
            # The whole prompt must fit beside what running prefills still need, with a block for each running
            # sequence to grow into: without that, admissions would be preempted at once, again and again.
            whole = int(blocks_for(len(sequence.tokens), self._block_size))
            if self.running and whole + len(self.running) > spare:
                break
            self.waiting.popleft()
            self.table.enter(sequence)
            self.running.append(sequence)
            count = min(left, len(sequence.tokens))
            self._grow(sequence.row, int(blocks_for(count, self._block_size)))
            spare, left = spare - whole, left - count
            new_rows.append(sequence.row)
            new_counts.append(count)
        if not new_rows:
            return rows, counts
        self._rows = None
        return (
            np.concatenate([rows, np.array(new_rows, dtype=np.int32)]),
            np.concatenate([counts, np.array(new_counts, dtype=np.int32)]),
        )

    def _spare_blocks(self) -> int:
        """Free blocks less what the running sequences' known tokens will still take."""
        rows = self._running_rows()
        outstanding = self._missing_blocks(rows, self.table.num_tokens[rows] - self.table.num_computed[rows])
        return self.pool.num_free - int(outstanding.sum())
