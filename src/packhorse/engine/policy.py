"""When waiting sequences may start: continuous, dynamic and static batching behind one protocol.

The scheduler asks `next_bucket` again and again while it has room. A policy says which bucket's most urgent sequence
may enter now, or None. What runs, and for how many tokens, is not its business.

    continuous   whoever waits may enter
    static       a batch starts when `batch_size` wait (or no more will come) and nothing runs; nobody enters it later
    dynamic      the same for each length bucket, which also starts when its oldest has waited `max_wait`
"""

from __future__ import annotations

import bisect
import math
from typing import Protocol

from packhorse.config import EngineConfig
from packhorse.engine.lengths import LengthHistogram
from packhorse.engine.sequence import Sequence
from packhorse.engine.waiting import WaitingQueue

LEARN_EVERY = 64
"""Requests between two looks at the histogram of lengths."""

LEARNED_BUCKETS = 4


class Policy(Protocol):
    """Decides admission. Told of everything that changes what it decides."""

    num_buckets: int

    def bucket_of(self, length: int) -> int:
        """Where a sequence of at most `length` tokens waits; counts it."""
        ...

    def next_bucket(self, queue: WaitingQueue, now: float, more_to_come: bool) -> int | None:
        """The bucket whose most urgent sequence may enter, or None for nobody now."""
        ...

    def entered(self, sequence: Sequence) -> None:
        """The sequence runs now (for the first time or again)."""
        ...

    def left(self, sequence: Sequence) -> None:
        """The sequence is done, failed or aborted (not preempted); it may never have run."""
        ...

    def wake_at(self, queue: WaitingQueue) -> float:
        """The moment from which on somebody may enter without anything else happening; infinity for never."""
        ...


class ContinuousPolicy:
    """Whoever waits may enter as soon as there is room."""

    num_buckets = 1

    def bucket_of(self, length: int) -> int:  # noqa: ARG002 - one bucket for all
        return 0

    def next_bucket(self, queue: WaitingQueue, now: float, more_to_come: bool) -> int | None:  # noqa: ARG002
        return 0 if queue.count(0) else None

    def entered(self, sequence: Sequence) -> None:
        pass

    def left(self, sequence: Sequence) -> None:
        pass

    def wake_at(self, queue: WaitingQueue) -> float:  # noqa: ARG002
        return math.inf


class BatchPolicy:
    """Batches that start together and end together, one at a time for each bucket of lengths.

    batch_size: sequences of a batch. max_wait: seconds the oldest waits at most before its batch starts unfilled,
    infinity for static batching. edges: upper lengths of the buckets but the last; None learns `num_buckets` of them.
    """

    def __init__(
        self, batch_size: int, max_wait: float, *, edges: tuple[int, ...] | None = (), num_buckets: int = 1
    ) -> None:
        self.num_buckets = num_buckets if edges is None else len(edges) + 1
        self.edges = edges or ()
        self._learns = edges is None
        self._histogram = LengthHistogram()
        self._batch_size = batch_size
        self._max_wait = max_wait
        self._seats = [0] * self.num_buckets
        self._members = [0] * self.num_buckets

    def bucket_of(self, length: int) -> int:
        if self._learns:
            self._histogram.add(length)
            if self._histogram.total % LEARN_EVERY == 0 or not self.edges:
                self.edges = self._histogram.buckets(self.num_buckets)
        return bisect.bisect_left(self.edges, length)

    def next_bucket(self, queue: WaitingQueue, now: float, more_to_come: bool) -> int | None:
        ready = [b for b in range(self.num_buckets) if self._may_enter(b, queue, now, more_to_come)]
        return min(ready, key=lambda b: queue.oldest_arrival(b) or 0.0, default=None)

    def entered(self, sequence: Sequence) -> None:
        if not sequence.in_batch:
            sequence.in_batch = True
            self._members[sequence.bucket] += 1
            self._seats[sequence.bucket] -= 1

    def left(self, sequence: Sequence) -> None:
        if sequence.in_batch:
            sequence.in_batch = False
            self._members[sequence.bucket] -= 1

    def wake_at(self, queue: WaitingQueue) -> float:
        free = (b for b in range(self.num_buckets) if not self._members[b])
        return min((self._waits_until(b, queue) for b in free), default=math.inf)

    def _waits_until(self, bucket: int, queue: WaitingQueue) -> float:
        oldest = queue.oldest_arrival(bucket)
        return math.inf if oldest is None else oldest + self._max_wait

    def _may_enter(self, bucket: int, queue: WaitingQueue, now: float, more_to_come: bool) -> bool:
        first = queue.peek(bucket)
        if first is None:
            self._seats[bucket] = 0  # the batch starts with those who were there
            return False
        if not self._members[bucket]:
            count = queue.count(bucket)
            starts = count >= self._batch_size or not more_to_come or now >= self._waits_until(bucket, queue)
            self._seats[bucket] = min(self._batch_size, count) if starts else 0
        return first.in_batch or self._seats[bucket] > 0


def make_policy(config: EngineConfig) -> Policy:
    """The policy that the settings ask for."""
    if config.policy == "static":
        return BatchPolicy(config.batch_size, math.inf)
    if config.policy == "dynamic":
        edges = config.length_buckets
        return BatchPolicy(config.batch_size, config.max_wait_ms / 1000, edges=edges, num_buckets=LEARNED_BUCKETS)
    return ContinuousPolicy()
