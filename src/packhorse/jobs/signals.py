"""Ctrl-C and SIGTERM: stop between two steps, keep what is finished."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any


class NoSignals:
    """Nothing stops the job."""

    signum: int | None = None

    def __enter__(self) -> NoSignals:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class StopSignals(NoSignals):
    """While entered, the first SIGINT or SIGTERM is only noted in `signum`; a second one acts as if uncaught."""

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.signum = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
