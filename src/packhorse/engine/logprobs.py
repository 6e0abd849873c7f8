"""Log-probabilities from raw logits, before temperature, penalties and filters."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from packhorse.engine.outputs import LOGPROB_FLOOR
from packhorse.runner.base import Float32
from packhorse.runner.compiled import compiled

Float64 = npt.NDArray[np.float64]

_LOG2_E = 1 / np.log(2.0)
_LN2_HIGH = 0.693145751953125  # its 15 highest bits: n * _LN2_HIGH is exact
_LN2_LOW = np.log(2.0) - _LN2_HIGH
_TAYLOR = tuple(1 / float(np.prod(np.arange(1.0, k + 1))) for k in range(13, -1, -1))
"""Coefficients of exp, highest first: beyond ±ln(2)/2 the next term is below 1e-17."""

_FAR = -700.0
"""Nothing so far below the peak counts, and its exponential is still a normal number."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of one position: the chosen token, its log-probability and rank (1 is the most probable), and the top ones."""

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


def token_logprobs(logits: Float32, token_id: int, count: int) -> TokenLogprobs:
    """logits: float32[V]. The `count` most probable tokens are listed in order, equal ones by id."""
    peak = float(logits.max())
    weights, bits = _room(len(logits), threading.get_ident())
    _exponentials(logits, peak, weights, bits)
    log_sum = peak + float(np.log(weights.sum()))
    top = _top(logits, min(count, len(logits))).tolist()
    chosen = float(logits[token_id])
    return TokenLogprobs(
        token_id=token_id,
        logprob=_reported(chosen - log_sum),
        rank=int(np.count_nonzero(logits > logits[token_id])) + 1,
        top_ids=tuple(top),
        top_logprobs=tuple(_reported(float(logits[i]) - log_sum) for i in top),
    )


@lru_cache(maxsize=16)
def _room(size: int, thread: int) -> tuple[Float64, npt.NDArray[np.int64]]:  # noqa: ARG001 - one for each
    """Memory that all rows of a thread use in turn: it stays in the processor's cache."""
    return np.empty(size, dtype=np.float64), np.empty(size, dtype=np.int64)


@compiled
def _exponentials(logits: Float32, peak: float, weights: Float64, bits: npt.NDArray[np.int64]) -> None:
    """weights[i] = exp(logits[i] - peak), exact to the last digits: 2^n times the exponential of what is left.

    Written out, because then the compiler does eight at once: numpy's own of 64-bit numbers takes eight times as long.
    """
    for i in range(len(logits)):
        x = max(np.float64(logits[i]) - peak, _FAR)
        n = np.floor(x * _LOG2_E + 0.5)
        rest = (x - n * _LN2_HIGH) - n * _LN2_LOW
        value = 0.0
        for coefficient in _TAYLOR:
            value = value * rest + coefficient
        weights[i] = value
        bits[i] = (np.int64(n) + 1023) << 52  # the bits of 2^n (IEEE 754)
    weights *= bits.view(np.float64)


@compiled
def _top(logits: Float32, count: int) -> npt.NDArray[np.int64]:
    """Indices of the `count` largest, largest first, equal ones by index: sorted into place as they are met."""
    found = np.empty(count, np.int64)
    held = 0
    for i in range(len(logits)):
        if held == count:
            if count == 0 or logits[i] <= logits[found[count - 1]]:
                continue
            held -= 1
        place = held
        while place > 0 and logits[found[place - 1]] < logits[i]:
            found[place] = found[place - 1]
            place -= 1
        found[place] = i
        held += 1
    return found


def _reported(value: float) -> float:
    return max(value, LOGPROB_FLOOR)
