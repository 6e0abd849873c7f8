"""How many prefill tokens a step may carry without holding up the sequences that decode in it."""

from __future__ import annotations

SMOOTHING = 0.2
"""Weight of the newest step in the running averages."""

ALARM = 0.5
"""Weight of a prefill token's cost that is above its average: a prompt's later chunks cost more than its first ones."""

MARGIN = 0.6
"""Part of the room that is planned for: steps of the same size differ, and the limit is for all of them."""

LEAST_TOKENS = 8
"""A prefill always gets that many, so that it ends, and otherwise a multiple of it."""


class PrefillPacer:
    """Keeps a step that carries prefill under `max_stall` times the step without it.

    Learns two times as it goes: of a step that only decodes, and of one prefill token more. Both are averages that
    forget, because the first grows with the number of sequences and both with the length of contexts.
    """

    def __init__(self, max_stall: float) -> None:
        self._room = MARGIN * (max_stall - 1)
        self._decode: float | None = None
        self._token: float | None = None

    def allowance(self) -> int:
        """Prefill tokens for the next step, if sequences decode in it."""
        if self._decode is None or self._token is None:
            return LEAST_TOKENS
        # Whole multiples, so that few shapes of steps occur: a runner has to prepare for each new one.
        return max(1, int(self._room * self._decode / self._token) // LEAST_TOKENS) * LEAST_TOKENS

    def step(self, seconds: float, *, decode_tokens: int, prefill_tokens: int) -> None:
        """A step took `seconds` for so many tokens of either kind."""
        if not decode_tokens:
            return
        if not prefill_tokens:
            self._decode = _average(self._decode, seconds)
        elif self._decode is not None:
            cost = max(seconds - self._decode, 1e-6) / prefill_tokens
            self._token = _average(self._token, cost, ALARM if cost > (self._token or 0.0) else SMOOTHING)


def _average(old: float | None, new: float, weight: float = SMOOTHING) -> float:
    return new if old is None else (1 - weight) * old + weight * new
