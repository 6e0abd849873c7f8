"""The text of one choice as it grows: detokenizing, then stop strings."""

from __future__ import annotations

from packhorse.text.detokenizer import IncrementalDecoder
from packhorse.text.stop import StopStrings


class TextStream:
    """Fed token by token; what `take` has given never changes.

    echo: text that stands in front of it. decoded: characters so far, which is where the next token's begin.
    released: of those, how many may be shown; the others may turn out to be a stop string.
    """

    def __init__(self, decoder: IncrementalDecoder, stops: StopStrings, echo: str = "") -> None:
        self._decoder = decoder
        self._stops = stops
        self._pieces = [echo] if echo else []
        self.decoded = self.released = len(echo)

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.matched

    def push(self, token_id: int, *, stops_active: bool) -> bool:
        """One more token; whether it completed a stop string, which is `matched` then."""
        text = self._decoder.push(token_id)
        if text:
            self.decoded += len(text)
            self._release(self._stops.push(text, active=stops_active))
        return self._stops.matched is not None

    def finish(self, *, stops_active: bool) -> None:
        """No more tokens: what was kept back is released, unless a stop string ended the text."""
        if self.matched is not None:
            return
        self._release(self._stops.push(self._decoder.finish(), active=stops_active))
        if self.matched is None:
            self._release(self._stops.finish())

    def take(self) -> str:
        """What may be shown and was not taken yet."""
        pieces = self._pieces
        if not pieces:
            return ""
        self._pieces = []
        return pieces[0] if len(pieces) == 1 else "".join(pieces)

    def _release(self, text: str) -> None:
        if text:
            self.released += len(text)
            self._pieces.append(text)
