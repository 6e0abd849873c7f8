"""Which sequences run in a step, and for how many tokens.

    add ─► waiting (policy: who may enter, and when) ─► running ─► finished
              ▲                                            │
              └──────── preempted (least urgent) ◄─────────┘   when no block is free: its blocks go, its tokens stay

Order of a step: every decoding sequence gets its one token, what is left of the token budget goes to prefills in
chunks, the most urgent first, and what is left then admits waiting sequences.

Urgency is `Sequence.order`: when it arrived, put back by its priority. Running is kept in that order, so its first is
never preempted and its last always is.
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass

import numpy as np

from packhorse.engine.block_pool import ROOT, BlockPool
from packhorse.engine.policy import Policy
from packhorse.engine.sequence import NOT_RUNNING, Sequence, blocks_for
from packhorse.engine.table import SequenceTable
from packhorse.engine.waiting import WaitingQueue
from packhorse.runner.base import Int32

CALM_STEPS = 64
"""Steps without trouble after which as many may run again as before the memory was short."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes. rows: int32[S], rows of the table. num_tokens: int32[S] ≥ 1, how many tokens of each."""

    rows: Int32
    num_tokens: Int32

    @property
    def total_tokens(self) -> int:
        return int(self.num_tokens.sum())


class Scheduler:
    """Three verbs: schedule, preempt (inside it), commit. Owns the waiting queue, the running list and the blocks.

    priority_seconds: how much later a request may have arrived and still go before one of the next lower priority.
    concurrency_limit: sequences that may run at once; the adaptive rate lowers it. prefill_allowance: prefill tokens
    that a step may carry beside decoding sequences; the pacer sets it, None leaves it to the token budget.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        max_num_seqs: int,
        token_budget: int,
        max_len: int,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool = True,
        priority_seconds: float = 10.0,
    ) -> None:
        # A step must be able to give every running sequence a token.
        self.table = SequenceTable(min(max_num_seqs, token_budget), max_len, block_size)
        self.pool = BlockPool(num_blocks)
        self.policy = policy
        self.waiting = WaitingQueue(policy.num_buckets)
        self.running: list[Sequence] = []
        self.concurrency_limit = len(self.table.sequences)
        self.prefill_allowance: int | None = None
        self.num_preemptions = 0
        self.prefix_queries = self.prefix_hits = 0
        self._prefix_caching = prefix_caching
        self._priority_seconds = priority_seconds
        self._numbers = itertools.count()
        self._token_budget = token_budget
        self._block_size = block_size
        self._rows: Int32 | None = None
        self._crowd, self._calm_steps = len(self.table.sequences), 0

    def add(self, sequence: Sequence, now: float) -> None:
        """Let a sequence wait. now: seconds, its arrival."""
        sequence.arrival_time = now
        sequence.order = (now + sequence.priority * self._priority_seconds, next(self._numbers))
        sequence.bucket = self.policy.bucket_of(sequence.expected_len)
        self.waiting.push(sequence)

    def schedule(self, now: float, more_to_come: bool) -> StepPlan | None:
        """The next step, or None when nothing can run: nothing waits, or the policy holds back what does."""
        rows = self._running_rows()
        counts = self._share_budget(rows)
        rows, counts, preempted = self._secure_blocks(rows, counts)
        if not preempted:
            rows, counts = self._admit(rows, counts, now, more_to_come)
        scheduled = counts > 0
        if not scheduled.all():
            rows, counts = rows[scheduled], counts[scheduled]
        return StepPlan(rows, counts) if len(rows) else None

    def commit(self, plan: StepPlan) -> None:
        """The step has run: its tokens' keys and values are in the cache."""
        table = self.table
        table.num_computed[plan.rows] += plan.num_tokens
        self._calm_steps += 1
        if self._calm_steps == CALM_STEPS:
            self._crowd = len(table.sequences)
        if self._prefix_caching:
            full = table.num_computed[plan.rows] // self._block_size > table.num_published[plan.rows]
            for row in plan.rows[full].tolist():
                self._publish(row)

    def append(self, rows: Int32, tokens: Int32) -> None:
        """Add one sampled token to each of `rows`."""
        table = self.table
        table.token_ids[rows, table.num_tokens[rows]] = tokens
        table.num_tokens[rows] += 1

    def preempt_last(self) -> Sequence | None:
        """Send the least urgent running sequence back to wait; None when only one runs, which is never preempted."""
        if len(self.running) < 2:
            return None
        sequence = self.running[-1]
        self._stop_running(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.push(sequence)
        return sequence

    def make_room(self) -> Sequence | None:
        """Memory is short: preempt, and let no more run at once than are left until CALM_STEPS have gone well.

        Else who was sent back would enter the next step, which would be too large again, and so on for ever.
        """
        sequence = self.preempt_last()
        self._crowd, self._calm_steps = max(1, len(self.running)), 0
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """The sequence is done, failed or aborted, wherever it is: its blocks and its row are free again."""
        if sequence.waiting:
            self.waiting.discard(sequence)
        else:
            self._stop_running(sequence)
        self.policy.left(sequence)

    def check_integrity(self) -> None:
        """Raises AssertionError unless blocks, rows and queues agree with each other."""
        self.pool.check_integrity()
        owners = np.zeros(self.pool.num_blocks, dtype=np.int32)
        for sequence in self.running:
            row = sequence.row
            assert self.table.sequences[row] is sequence, "a running sequence does not own its row"
            assert not sequence.finished, "a finished sequence still runs"
            assert not sequence.waiting, "a running sequence waits"
            held, computed = int(self.table.num_blocks[row]), int(self.table.num_computed[row])
            assert held * self._block_size >= computed, "computed tokens have no block"
            assert computed < self.table.num_tokens[row] <= self.table.end[row], "token counts contradict each other"
            np.add.at(owners, self.table.blocks_of(row), 1)
        assert np.array_equal(owners, self.pool.owners), "block owners do not match the block tables"
        assert len(self.running) + self.table.num_free_rows == len(self.table.sequences), "a row is lost"
        waiting = list(self.waiting)
        assert len(waiting) == len(self.waiting), "the waiting queue has lost count"
        assert all(s.row == NOT_RUNNING and not s.finished for s in waiting), "a waiting sequence holds a row"
        orders = [s.order for s in self.running]
        assert orders == sorted(orders), "running is out of order"

    def _running_rows(self) -> Int32:
        if self._rows is None:
            self._rows = np.array([s.row for s in self.running], dtype=np.int32)
        return self._rows

    def _share_budget(self, rows: Int32) -> Int32:
        """int32[S]: a token for each decoding sequence, then chunks for the others in order of urgency."""
        wanted = self.table.num_tokens[rows] - self.table.num_computed[rows]
        prefilling = wanted > 1
        if not prefilling.any():
            return wanted
        left = self._prefill_budget(int(np.count_nonzero(~prefilling)))
        ahead = np.cumsum(wanted * prefilling) - wanted
        return np.where(prefilling, np.clip(left - ahead, 0, wanted), 1).astype(np.int32)

    def _prefill_budget(self, decoding: int) -> int:
        """Tokens of this step that are left for prefills beside `decoding` sequences."""
        left = self._token_budget - decoding
        return left if self.prefill_allowance is None or not decoding else min(left, self.prefill_allowance)

    def _secure_blocks(self, rows: Int32, counts: Int32) -> tuple[Int32, Int32, bool]:
        """Give the rows the blocks that their tokens need; where there are too few, the least urgent go back."""
        missing = self._missing_blocks(rows, counts)
        preempted = False
        while int(missing.sum()) > self.pool.num_free:
            if self.preempt_last() is None:
                raise RuntimeError("the oldest sequence does not fit the cache; it should have been refused on arrival")
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
        self.table.add_blocks(row, self.pool.allocate(count))

    def _stop_running(self, sequence: Sequence) -> None:
        self.pool.release(self.table.blocks_of(sequence.row))
        self.table.leave(sequence)
        self.running.remove(sequence)
        self._rows = None

    def _admit(self, rows: Int32, counts: Int32, now: float, more_to_come: bool) -> tuple[Int32, Int32]:
        """Let waiting sequences in while policy, rows, token budget and blocks allow."""
        decoding = int(np.count_nonzero(self.table.num_tokens[rows] - self.table.num_computed[rows] == 1))
        left = self._prefill_budget(decoding) - (int(counts.sum()) - decoding)
        new_rows: list[int] = []
        new_counts: list[int] = []
        prefilling = rows[self.table.num_tokens[rows] - self.table.num_computed[rows] > 1].tolist()
        spare = self._spare_blocks() if left and len(self.waiting) else 0
        limit = min(self.concurrency_limit, self._crowd)
        while left and self.table.num_free_rows and len(self.running) < limit:
            bucket = self.policy.next_bucket(self.waiting, now, more_to_come)
            sequence = self.waiting.peek(bucket) if bucket is not None else None
            if sequence is None:
                break
            known = self._known_prefix(sequence)
            if self._soon_known(sequence, len(known), prefilling):
                break  # in the next step it finds what this one computes
            # The whole prompt must fit beside what running prefills still need, with a block for each running
            # sequence to grow into: without that, admissions would be preempted at once, again and again. Blocks
            # that others own already cost nothing.
            cost = int(blocks_for(len(sequence.tokens), self._block_size))
            cost -= int(np.count_nonzero(self.pool.owners[known]))
            if self.running and cost + len(self.running) > spare:
                break
            count = self._enter(sequence, known, left)
            spare, left = spare - cost, left - count
            new_rows.append(sequence.row)
            new_counts.append(count)
            prefilling.append(sequence.row)
        if not new_rows:
            return rows, counts
        self._rows = None
        return (
            np.concatenate([rows, np.array(new_rows, dtype=np.int32)]),
            np.concatenate([counts, np.array(new_counts, dtype=np.int32)]),
        )

    def _enter(self, sequence: Sequence, known: list[int], left: int) -> int:
        """The sequence runs from now on, with what is known of its prefix; returns how many tokens this step gives."""
        self.waiting.pop(sequence.bucket)
        self.table.enter(sequence)
        bisect.insort(self.running, sequence, key=lambda s: s.order)
        self.policy.entered(sequence)
        row, computed = sequence.row, len(known) * self._block_size
        if self._looks_up(sequence):
            self.prefix_queries += len(sequence.tokens)
            self.prefix_hits += computed
        if known:
            self.pool.share(known)
            self.table.add_blocks(row, np.array(known, dtype=np.int32))
            self.table.num_computed[row] = computed
            self.table.num_published[row] = len(known)
            self.table.prefix_identity[row] = self.pool.identity_of(known[-1])
        count = min(left, len(sequence.tokens) - computed)
        held = int(self.table.num_blocks[row])
        self._grow(row, int(blocks_for(computed + count, self._block_size)) - held)
        return count

    def _known_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks whose contents need not be computed: of all but the last token, whose logits are wanted."""
        return self.pool.find(sequence.tokens[:-1], self._block_size) if self._looks_up(sequence) else []

    def _soon_known(self, sequence: Sequence, known: int, prefilling: list[int]) -> bool:
        """Whether this step computes the next block of the sequence's beginning, of which `known` blocks are known.

        prefilling: rows of the step. Room is left in it, so all of them but the last to enter get all that they want.
        """
        begin, end = known * self._block_size, (known + 1) * self._block_size
        if not prefilling or end >= len(sequence.tokens) or not self._looks_up(sequence):
            return False
        table, tokens = self.table, sequence.tokens
        alike = (table.token_ids[prefilling, begin:end] == tokens[begin:end]).all(axis=1)
        return any(
            table.num_computed[row] < end <= table.num_tokens[row]
            and np.array_equal(table.token_ids[row, :begin], tokens[:begin])
            for row in itertools.compress(prefilling, alike.tolist())
        )

    def _looks_up(self, sequence: Sequence) -> bool:
        return self._prefix_caching and not sequence.wants_prompt_logprobs

    def _publish(self, row: int) -> None:
        """Make the row's newly full blocks known."""
        table, size = self.table, self._block_size
        first, full = int(table.num_published[row]), int(table.num_computed[row]) // size
        identity = int(table.prefix_identity[row]) if first else ROOT
        for i in range(first, full):
            tokens = table.token_ids[row, i * size : (i + 1) * size].tobytes()
            identity = self.pool.publish(int(table.block_table[row, i]), identity, tokens)
        table.num_published[row], table.prefix_identity[row] = full, identity

    def _spare_blocks(self) -> int:
        """Free blocks less what the running sequences' known tokens will still take."""
        rows = self._running_rows()
        outstanding = self._missing_blocks(rows, self.table.num_tokens[rows] - self.table.num_computed[rows])
        return self.pool.num_free - int(outstanding.sum())
