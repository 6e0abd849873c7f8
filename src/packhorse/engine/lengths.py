"""How long requests are: a running histogram, and the buckets that it suggests."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

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
        """Upper edges of at most `count` buckets, the last one open: those with which requests are held up least.

        In a batch all wait for the longest: 10 tokens beside 1,000 take 100 times as long as alone. The edges make the
        sum of these ratios over all requests as small as it can be, so the short are kept from the long even where
        they are few. A bucket of (a, b] holds lengths a < n <= b. Empty when nothing was counted: one bucket for all.
        """
        steps = np.flatnonzero(self.counts)
        if not len(steps):
            return ()
        longest = np.array([_least(step + 1) - 1 for step in steps.tolist()], dtype=np.float64)
        return tuple(int(longest[end - 1]) for end in _cheapest_cuts(longest, self.counts[steps] / longest, count))


def _cheapest_cuts(longest: Floats, shares: Floats, count: int) -> list[int]:
    """Where `count` ranges of steps end but the last, the cost of steps i … j-1 being longest[j-1] · sum(shares[i:j]).

    By dynamic programming: the cheapest k ranges up to j are the cheapest k - 1 up to some i, and one from i to j.
    """
    size = len(longest)
    begins, ends = np.arange(size + 1)[:, None], np.arange(size + 1)[None, :]
    below = np.concatenate([[0.0], np.cumsum(shares)])
    cost = np.where(begins < ends, longest[ends - 1] * (below[ends] - below[begins]), np.inf)
    cheapest, came_from = cost[0], []
    for _ in range(min(count, size) - 1):
        total = cheapest[:, None] + cost
        came_from.append(total.argmin(axis=0))
        cheapest = total.min(axis=0)
    cuts = [size]
    for origin in reversed(came_from):
        cuts.append(int(origin[cuts[-1]]))
    return cuts[:0:-1]


def _step(length: int) -> int:
    return int(math.log2(length) * STEPS_PER_DOUBLING + 1e-9)


def _least(step: int) -> int:
    """The shortest length of a step."""
    return math.ceil(2 ** (step / STEPS_PER_DOUBLING) - 1e-9)
