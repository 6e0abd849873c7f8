"""The text of one choice as it grows: detokenizing, then stop strings."""

from __future__ import annotations

from packhorse.text.detokenizer import IncrementalDecoder
from packhorse.text.stop import StopStrings


class TextStream:
    """Fed token by token; `text` is what may be shown, and never changes except by growing."""

    def __init__(self, decoder: IncrementalDecoder, stops: StopStrings) -> None:
        self._decoder = decoder
        self._stops = stops
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.matched

    def push(self, token_id: int, *, stops_active: bool) -> None:
        """One more token; `matched` afterwards says whether it completed a stop string."""
        self._release(self._stops.push(self._decoder.push(token_id), active=stops_active))

    def finish(self, *, stops_active: bool) -> None:
        """No more tokens: what was kept back is released, unless a stop string ended the text."""
        if self.matched is not None:
            return
        self._release(self._stops.push(self._decoder.finish(), active=stops_active))
        if self.matched is None:
            self._release(self._stops.finish())

    def _release(self, text: str) -> None:
        if text:
            self._pieces.append(text)
