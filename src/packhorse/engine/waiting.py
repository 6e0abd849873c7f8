"""Sequences that wait for a place, the most urgent first, in one bucket or several (by length)."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator

from packhorse.engine.sequence import Sequence


class WaitingQueue:
    """A heap for each bucket. A sequence that ends while it waits is only marked; its entry goes when it surfaces.

        bucket 0   heap by Sequence.order     [ (3.1, 7) (4.0, 9) (5.2, 12) … ]     most urgent first, after members
                                                                                    of the batch that runs already
                   arrivals, oldest first     [ 9, 7, 12, … ]                       how long has anyone waited?

    num_tokens: of all that wait. Every operation costs at most the logarithm of the queue's length.
    """

    def __init__(self, num_buckets: int = 1) -> None:
        self._heaps: list[list[tuple[bool, tuple[float, int], Sequence]]] = [[] for _ in range(num_buckets)]
        self._arrivals: list[deque[Sequence]] = [deque() for _ in range(num_buckets)]
        self._counts = [0] * num_buckets
        self.num_tokens = 0

    def __len__(self) -> int:
        return sum(self._counts)

    def __iter__(self) -> Iterator[Sequence]:
        return (s for heap in self._heaps for *_, s in heap if s.waiting)

    def count(self, bucket: int) -> int:
        """Sequences that wait in this bucket."""
        return self._counts[bucket]

    def push(self, sequence: Sequence) -> None:
        """Add a sequence to the bucket it names. One that comes back after a preemption keeps its order.

        A member of a batch goes before all others: the batch ends only with it, and nobody else may enter until then.
        """
        sequence.waiting = True
        self._counts[sequence.bucket] += 1
        self.num_tokens += len(sequence.tokens)
        heapq.heappush(self._heaps[sequence.bucket], (not sequence.in_batch, sequence.order, sequence))
        self._drop_gone(sequence.bucket)
        self._arrivals[sequence.bucket].append(sequence)

    def peek(self, bucket: int) -> Sequence | None:
        """The most urgent sequence of a bucket, or None."""
        heap = self._heaps[bucket]
        while heap and not heap[0][-1].waiting:
            heapq.heappop(heap)
        return heap[0][-1] if heap else None

    def pop(self, bucket: int) -> Sequence:
        """Take out what `peek` shows; there must be one."""
        sequence = self.peek(bucket)
        if sequence is None:
            raise RuntimeError("nothing waits in this bucket")
        heapq.heappop(self._heaps[bucket])
        self.discard(sequence)
        return sequence

    def discard(self, sequence: Sequence) -> None:
        """Take a waiting sequence out, wherever it stands."""
        sequence.waiting = False
        self._counts[sequence.bucket] -= 1
        self.num_tokens -= len(sequence.tokens)

    def oldest_arrival(self, bucket: int) -> float | None:
        """When the sequence arrived that has waited longest in this bucket."""
        arrivals = self._drop_gone(bucket)
        return arrivals[0].arrival_time if arrivals else None

    def _drop_gone(self, bucket: int) -> deque[Sequence]:
        arrivals = self._arrivals[bucket]
        while arrivals and not arrivals[0].waiting:
            arrivals.popleft()
        return arrivals
