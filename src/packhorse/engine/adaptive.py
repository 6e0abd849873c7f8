"""How many sequences may run at once, found by latency targets: up while there is demand, down when one is missed."""

from __future__ import annotations

import math

import numpy as np

from packhorse.config import EngineConfig

WINDOW = 16
"""Steps between two decisions."""

BAND = 0.8
"""The limit rises only while latency is below this part of the target, so that it does not swing about it."""

FORGET = 20
"""Windows for which a limit that missed the target is not tried again."""


class AdaptiveConcurrency:
    """Additive increase, multiplicative decrease, with a memory of what was too much.

    least, most: bounds of the limit. target_itl: seconds between two tokens of a sequence (a step's duration, as its
    sequences feel it). target_prefill: seconds from a request's first step to its first token. Infinity for no target.
    """

    def __init__(self, least: int, most: int, *, target_itl: float, target_prefill: float) -> None:
        self.limit = max(least, most // 4)
        self._least, self._most = least, most
        self._target_itl, self._target_prefill = target_itl, target_prefill
        self._steps: list[float] = []
        self._prefills: list[float] = []
        self._too_much = most + 1
        self._since = 0

    def first_token(self, seconds: float) -> None:
        """A request's first token came `seconds` after its first step began."""
        self._prefills.append(seconds)

    def step(self, seconds: float, *, demand: bool) -> None:
        """A step took `seconds`; demand: somebody waits although the limit is reached."""
        self._steps.append(seconds)
        if len(self._steps) < WINDOW:
            return
        load = self._load()
        self._steps.clear()
        self._prefills.clear()
        self._since += 1
        if self._since > FORGET:
            self._too_much = self._most + 1
        if load > 1:
            self._too_much, self._since = self.limit, 0
            self.limit = max(self._least, min(self.limit - 1, int(self.limit * BAND)))
        elif load < BAND and demand:
            self.limit = min(self._most, self._too_much - 1, self.limit + max(1, self.limit // 8))
            self.limit = max(self._least, self.limit)

    def _load(self) -> float:
        """The worse of the two latencies over its target, at the 90th percentile of the window."""
        itl = float(np.quantile(self._steps, 0.9)) / self._target_itl
        prefill = float(np.quantile(self._prefills, 0.9)) / self._target_prefill if self._prefills else 0.0
        return max(itl, prefill)


def adaptive_concurrency(config: EngineConfig, most: int) -> AdaptiveConcurrency | None:
    """From the settings; None when there is no target, and for static batches, whose size is given."""
    targets = config.target_itl_ms, config.target_ttft_ms
    if targets == (None, None) or config.policy == "static":
        return None
    itl, prefill = (math.inf if target is None else target / 1000 for target in targets)
    return AdaptiveConcurrency(1, most, target_itl=itl, target_prefill=prefill)
