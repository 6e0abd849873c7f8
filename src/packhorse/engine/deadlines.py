"""Requests that must end, or must have begun, by a certain moment."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadline:
    """queued_only: it does not matter any more once the request has run. seconds: as the request gave it.

    number: of the request; its id may be used again before the moment comes.
    """

    request_id: str
    number: int
    arrival: float
    queued_only: bool
    seconds: float


class Deadlines:
    """A heap of moments. What ended before its deadline stays in it until then; the engine ignores it."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Deadline]] = []
        self._numbers = itertools.count()

    def add(self, deadline: Deadline) -> None:
        heapq.heappush(self._heap, (deadline.arrival + deadline.seconds, next(self._numbers), deadline))

    def passed(self, now: float) -> list[Deadline]:
        """Those whose moment has come, the earliest first; each is returned once."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            found.append(heapq.heappop(self._heap)[2])
        return found

    def next(self) -> float:
        """The next moment, infinity when there is none."""
        return self._heap[0][0] if self._heap else float("inf")
