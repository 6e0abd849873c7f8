"""Stop strings over streamed text: nothing of a stop string is ever released."""

from __future__ import annotations


class StopStrings:
    """Passes text on until one of `stops` appears in it; keeps back what may be the beginning of one.

    When several match, the one that is complete first wins, of those the one that begins first: so the result does not
    depend on how the text was split. The text ends at its first character (after its last one when `include`).
    """

    def __init__(self, stops: tuple[str, ...], *, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._beginnings = frozenset(stop[0] for stop in stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, active: bool = True) -> str:
        """Text that is certain. When a stop string is complete, `matched` is set and what came before it returned.

        active: False lets everything pass unseen (before `min_tokens`).
        """
        if not self._held and self._beginnings.isdisjoint(text):
            return text
        held, self._held = self._held + text, ""
        if not active:
            return held
        matches = [(begin + len(s), begin, s) for s in self._stops if (begin := held.find(s)) >= 0]
        if matches:
            end, begin, self.matched = min(matches)
            return held[:end] if self._include else held[:begin]
        keep = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def finish(self) -> str:
        """The text ends: what was kept back is no stop string after all."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` (and is not all of it)."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
