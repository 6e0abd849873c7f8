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
Float64 = npt.NDArray[np.float64]
_F = TypeVar("_F", bound=Callable[..., Any])

BUCKETS = 512
"""Weights are counted in this many logarithmic buckets to find the few that a filter can keep, instead of sorting."""

BUCKET_WIDTH = 0.0625
"""In nats: bucket i holds weights from exp(-i/16) down to exp(-(i+1)/16) times the largest; the last one the rest."""


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
    usable = np.isfinite(logits[np.arange(len(logits)), tokens])
    drawn = np.flatnonzero((batch.temperature > 0) & usable)
    if len(drawn):
        draws = uniform(batch.keys[drawn], batch.positions[drawn])
        _draw_rows(logits, drawn, batch.temperature, batch.top_k, batch.top_p, batch.min_p, draws, tokens)
    return tokens, usable


@_jit
def _draw_rows(
    logits: Float32,
    rows: npt.NDArray[np.int64],
    temperature: Float32,
    top_k: Int32,
    top_p: Float32,
    min_p: Float32,
    draws: Float64,
    tokens: Int32,
) -> None:
    weights = np.empty(logits.shape[1], np.float64)
    for i in range(len(rows)):
        row = rows[i]
        _weigh(logits[row], np.float64(temperature[row]), weights)
        k, p, m = top_k[row], np.float64(top_p[row]), np.float64(min_p[row])
        if k == 0 and p >= 1.0 and m == 0.0:
            tokens[row] = _pick(weights, draws[i])
        else:
            kept = _filter(weights, k, p, m)
            tokens[row] = kept[_pick(weights[kept], draws[i])]


@_jit
def _weigh(logits: Float32, temperature: float, weights: Float64) -> None:
    """weights = exp((logits - max) / temperature)."""
    peak = logits[0]
    for value in logits:
        peak = max(peak, value)
    for i in range(len(logits)):
        weights[i] = np.exp((np.float64(logits[i]) - np.float64(peak)) / temperature)


@_jit
def _pick(weights: Float64, draw: float) -> int:
    """Index where the running sum first exceeds draw times the total."""
    target = draw * weights.sum()
    running = 0.0
    last = 0
    for i in range(len(weights)):
        if weights[i] > 0.0:
            running += weights[i]
            last = i
            if running > target:
                return i
    return last


@_jit
def _filter(weights: Float64, top_k: int, top_p: float, min_p: float) -> npt.NDArray[np.int64]:
    """Indices that top_k, then top_p, then min_p keep, heaviest first (equal ones by index); never none."""
    candidates = np.flatnonzero(weights >= _floor(weights, top_k, top_p, min_p))
    order = candidates[np.argsort(-weights[candidates], kind="mergesort")]
    if top_k > 0:
        order = order[:top_k]
    total = weights[order].sum() if top_k > 0 else weights.sum()
    running = 0.0
    kept = 0
    for i in order:
        if kept > 0 and (running >= top_p * total or weights[i] < min_p):
            break
        running += weights[i]
        kept += 1
    return order[:kept]


@_jit
def _floor(weights: Float64, top_k: int, top_p: float, min_p: float) -> float:
    """A weight below which nothing can be kept, found without sorting; may let a few too many through."""
    counts = np.zeros(BUCKETS, np.int64)
    masses = np.zeros(BUCKETS, np.float64)
    for weight in weights:
        bucket = BUCKETS - 1
        if weight > 0.0:
            bucket = min(BUCKETS - 1, int(-np.log(weight) / BUCKET_WIDTH))
        counts[bucket] += 1
        masses[bucket] += weight
    enough_mass = top_p * masses.sum()
    count, mass = 0, 0.0
    for bucket in range(BUCKETS - 1):
        count += counts[bucket]
        mass += masses[bucket]
        if (top_k > 0 and count >= top_k) or (top_k == 0 and top_p < 1.0 and mass >= enough_mass):
            # The bucket's lower edge, a hair lower: a weight on the edge may have been counted on either side.
            edge: float = np.exp(-(bucket + 1) * BUCKET_WIDTH) * (1 - 1e-9)
            return max(min_p, edge)
    return min_p
