"""Counts of observed values in fixed buckets, for quantiles without keeping the values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SECONDS = tuple(round(m * 10.0**e, 6) for e in range(-4, 4) for m in (1, 1.5, 2, 3, 5, 7))
"""Upper edges from 100 µs to 2 hours, six a decade: fit for a token on a GPU and for a batch on a slow CPU."""

COUNTS = tuple(float(2**i) for i in range(13))
"""Upper edges for sizes of batches: 1, 2, 4 … 4096."""

TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
"""Upper edges for numbers of tokens: 1, 2, 5 … 500,000."""

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """counts: of each bucket, one more than `edges`: the last is for what lies beyond. total: sum of all values."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """0 when nothing was observed."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """The value below which `share` of the observations lie, interpolated in its bucket; 0 when there are none.

        What lies beyond the last edge is reported as that edge.
        """
        wanted = share * self.count
        below = 0
        for i, count in enumerate(self.counts):
            if count and below + count >= wanted:
                low = self.edges[i - 1] if i else 0.0
                high = self.edges[min(i, len(self.edges) - 1)]
                return low + (high - low) * (wanted - below) / count
            below += count
        return 0.0


class Histogram:
    """Collects values; `snapshot` freezes them."""

    def __init__(self, edges: tuple[float, ...] = SECONDS) -> None:
        self._edges = edges
        self._upper = np.array(edges)
        self._counts = np.zeros(len(edges) + 1, dtype=np.int64)
        self._total = 0.0

    def observe(self, values: Values | float) -> None:
        """Count one value or many; a value on an edge belongs to the bucket below it."""
        many = np.atleast_1d(np.asarray(values, dtype=np.float64))
        places = np.searchsorted(self._upper, many, side="left")
        self._counts += np.bincount(places, minlength=len(self._counts))
        self._total += float(many.sum())

    def snapshot(self) -> HistogramSnapshot:
        return HistogramSnapshot(self._edges, tuple(self._counts.tolist()), self._total)
