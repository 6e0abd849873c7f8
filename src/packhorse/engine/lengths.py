"""How long requests are: a running histogram, and the buckets that it suggests."""

from __future__ import annotations

import math

import numpy as np

STEPS_PER_DOUBLING = 4
LARGEST = 1 << 20


class LengthHistogram:
    """Counts lengths in steps of a quarter of a doubling; constant memory, whatever is counted."""

    def __init__(self) -> None:
        self.counts = np.zeros(_step(LARGEST) + 1, dtype=np.int64)

    def add(self, length: int) -> None:
        """Count one request of `length` tokens (at least 1)."""
        self.counts[_step(min(max(length, 1), LARGEST))] += 1

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    def rows(self) -> list[tuple[int, int, int]]:
        """(shortest, longest, count) of each step that has any."""
        return [(_least(i), _least(i + 1) - 1, int(self.counts[i])) for i in np.flatnonzero(self.counts).tolist()]

    def buckets(self, count: int) -> tuple[int, ...]:
        """Upper edges of at most `count` buckets, the last one open: as many requests in each as can be.

        A bucket of (a, b] holds lengths a < n <= b. Empty when nothing was counted: one bucket for all.
        """
        if not self.total:
            return ()
        share = np.cumsum(self.counts) / self.total
        edges = [_least(int(np.searchsorted(share, part / count)) + 1) - 1 for part in range(1, count)]
        longest = _least(int(np.flatnonzero(self.counts)[-1]) + 1) - 1
        return tuple(sorted({edge for edge in edges if edge < longest}))


def _step(length: int) -> int:
    return int(math.log2(length) * STEPS_PER_DOUBLING + 1e-9)


def _least(step: int) -> int:
    """The shortest length of a step."""
    return math.ceil(2 ** (step / STEPS_PER_DOUBLING) - 1e-9)
