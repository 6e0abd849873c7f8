"""From logits to token ids: argmax, or a draw from what temperature and filters leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numba
import numpy as np
import numpy.typing as npt

from packhorse.engine.random import Uint64, uniform
from packhorse.runner.base import Float32, Int32

Bool = npt.NDArray[np.bool_]
_F = TypeVar("_F", bound=Callable[..., Any])

BUCKETS = 512
"""Distances are counted in this many buckets to find the few tokens that a filter can keep, instead of sorting all."""

BUCKETS_PER_NAT = np.float32(16)
"""Bucket i holds distances from i/16 to (i+1)/16 (exact in binary); the last one all the rest."""


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Settings of R rows. temperature (0: greedy), top_p, min_p: float32[R]; top_k: int32[R], 0 for all.

    keys, positions: uint64[R], the stream of random numbers and the index of the draw in it.
    """

    temperature: Float32
    top_k: Int32
    top_p: Float32
    min_p: Float32
    keys: Uint64
    positions: Uint64


def _jit(function: _F) -> _F:
    compiled: _F = numba.njit(cache=True, nogil=True)(function)
    return compiled


def sample(logits: Float32, batch: SamplingBatch) -> tuple[Int32, Bool]:
    """Token ids int32[R] and whether each row's logits were usable (no NaN, no infinite peak): bool[R].

    logits: float32[R, V], not changed. Each row's result is a function of its own logits and settings alone.
    """
    tokens = logits.argmax(axis=1).astype(np.int32)  # a NaN counts as the largest
    peaks = logits[np.arange(len(logits)), tokens]
    usable = np.isfinite(peaks)
    drawn = np.flatnonzero((batch.temperature > 0) & usable)
    if len(drawn):
        draws = uniform(batch.keys[drawn], batch.positions[drawn])
        row = _Row(logits.shape[1])
        for i, draw in zip(drawn.tolist(), draws.tolist(), strict=True):
            row.weigh(logits[i], peaks[i], batch.temperature[i])
            tokens[i] = row.draw(int(batch.top_k[i]), float(batch.top_p[i]), float(batch.min_p[i]), draw)
    return tokens, usable


class _Row:
    """One row at a time in two buffers that stay in the processor's cache.

    distances: float32[V], how far below the peak each logit is, divided by the temperature. weights: exp(-distances).
    numpy computes the exponentials, many at once; what is left needs none.
    """

    def __init__(self, vocab_size: int) -> None:
        self._distances: Float32 = np.empty(vocab_size, dtype=np.float32)
        self._weights: Float32 = np.empty(vocab_size, dtype=np.float32)

    def weigh(self, logits: Float32, peak: np.float32, temperature: np.float32) -> None:
        with np.errstate(over="ignore"):  # a masked logit, a tiny temperature: infinitely far, weight 0
            np.subtract(peak, logits, out=self._distances)
            np.divide(self._distances, temperature, out=self._distances)
        np.negative(self._distances, out=self._weights)
        np.exp(self._weights, out=self._weights)

    def draw(self, top_k: int, top_p: float, min_p: float, draw: float) -> int:
        """The token that `draw`, uniform in [0, 1), falls on."""
        if top_k == 0 and top_p >= 1 and min_p == 0:
            return int(_pick(self._weights, draw))
        kept = _filter(self._distances, self._weights, top_k, top_p, min_p)
        return int(kept[_pick(self._weights[kept], draw)])


@_jit
def _pick(weights: Float32, draw: float) -> int:
    """Index where the running sum first exceeds draw times the total."""
    total = 0.0
    for weight in weights:
        total += np.float64(weight)
    target = draw * total
    running = 0.0
    last = 0
    for i in range(len(weights)):
        if weights[i] > 0.0:
            running += np.float64(weights[i])
            last = i
            if running > target:
                return i
    return last


@_jit
def _filter(distances: Float32, weights: Float32, top_k: int, top_p: float, min_p: float) -> npt.NDArray[np.int64]:
    """Indices that top_k, then top_p, then min_p keep, heaviest first (equal ones by index); never none."""
    reach, total = _reach(distances, weights, top_k, top_p)
    if min_p > 0.0 and top_k == 0:  # else what min_p drops still counts in the mass that top_p is a part of
        reach = min(reach, -np.log(min_p) + 0.001)  # a little beyond, for the weight itself decides
    candidates = np.flatnonzero(distances < reach)
    order = candidates[np.argsort(distances[candidates], kind="mergesort")]
    if top_k > 0:
        order = order[:top_k]
        total = 0.0
        for i in order:
            total += np.float64(weights[i])
    running = 0.0
    kept = 0
    for i in order:
        if kept > 0 and (running >= top_p * total or weights[i] < min_p):
            break
        running += np.float64(weights[i])
        kept += 1
    return order[:kept]


@_jit
def _reach(distances: Float32, weights: Float32, top_k: int, top_p: float) -> tuple[float, float]:
    """A distance at and beyond which nothing can be kept, found by counting in buckets; and the sum of all weights."""
    counts = np.zeros(BUCKETS, np.int64)
    masses = np.zeros(BUCKETS, np.float64)
    for i in range(len(distances)):
        bucket = int(min(distances[i] * BUCKETS_PER_NAT, np.float32(BUCKETS - 1)))
        counts[bucket] += 1
        masses[bucket] += np.float64(weights[i])
    total = masses.sum()
    count, mass = 0, 0.0
    for bucket in range(BUCKETS - 1):
        count += counts[bucket]
        mass += masses[bucket]
        # A hair more mass than asked, because sums in another order round differently.
        if (top_k > 0 and count >= top_k) or (top_k == 0 and mass >= top_p * total * (1 + 1e-12)):
            return float((bucket + 1) / BUCKETS_PER_NAT), total
    return np.inf, total
