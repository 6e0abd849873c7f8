"""Log-probabilities from raw logits, before temperature, penalties and filters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from packhorse.engine.outputs import LOGPROB_FLOOR
from packhorse.runner.base import Float32


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
    wide = logits.astype(np.float64)
    peak = wide.max()
    log_sum = peak + np.log(np.exp(wide - peak).sum())
    top = _top(wide, count)
    chosen = wide[token_id]
    return TokenLogprobs(
        token_id=token_id,
        logprob=_reported(chosen - log_sum),
        rank=int(np.count_nonzero(wide > chosen)) + 1,
        top_ids=tuple(top),
        top_logprobs=tuple(_reported(wide[i] - log_sum) for i in top),
    )


def _top(logits: np.ndarray, count: int) -> list[int]:
    if count == 0:
        return []
    count = min(count, len(logits))
    threshold = np.partition(logits, -count)[-count]
    candidates = np.flatnonzero(logits >= threshold)
    order = np.argsort(-logits[candidates], kind="stable")
    return [int(i) for i in candidates[order[:count]]]


def _reported(value: float) -> float:
    return max(float(value), LOGPROB_FLOOR)
