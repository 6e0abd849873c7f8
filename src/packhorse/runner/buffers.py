"""The memory that values live in between segments.

A value is dead after its last reader, so its memory serves a later one. With the carried cos and sin apart, a model
of any depth needs about two sets:

    step        segment 0       attention 0     segment 1        attention 1     segment 2
    writes      h0 q0 k0 v0     a0              h1 q1 k1 v1      a1              h2 …
    memory      A  C  E  F      H               B  D  G  I       C               A  …
                 ╰──── read by segment 1 ──────► free after it: A, H;   C, E, F free after attention 0

What a step writes never shares memory with what it reads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from packhorse.errors import PackError
from packhorse.pack.manifest import Manifest, Value

_DTYPES: dict[str, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "int64": np.int64,
    "int32": np.int32,
    "bool": np.bool_,
    "int8": np.int8,
    "uint8": np.uint8,
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value lies: buffer number, and its shape with "T" and "R" left open."""

    buffer: int
    dtype: type[np.generic]
    shape: tuple[int | str, ...]

    def sized(self, tokens: int, rows: int) -> tuple[int, ...]:
        return tuple({"T": tokens, "R": rows}.get(axis, 0) if isinstance(axis, str) else axis for axis in self.shape)


class StepBuffers:
    """Memory for every value of a pack, shared by values that are never alive together."""

    def __init__(self, manifest: Manifest) -> None:
        values = {v.name: v for s in manifest.segments for v in (*s.inputs, *s.outputs)}
        self._kinds: list[Value] = []
        self._buffers: list[npt.NDArray[Any]] = []
        self.places = self._assign(values, list(program(manifest)))

    def fits(self, tokens: int, rows: int) -> bool:
        """Whether there is room for a step of `tokens` and `rows` without moving memory."""
        needed = self._needed(tokens, rows)
        return bool(self._buffers) and all(b.size >= n for b, n in zip(self._buffers, needed, strict=True))

    def reserve(self, tokens: int, rows: int) -> bool:
        """Make room for a step of `tokens` and `rows`. True if memory moved, so that old views are worth nothing.

        Room grows by doubling, so a run of slowly growing steps moves it a few times only. Raises MemoryError when it
        cannot be had; then no room is left at all.
        """
        if self.fits(tokens, rows):
            return False
        needed = self._needed(tokens, rows)
        room = [max(n, 2 * b.size if b.size < n else b.size) for b, n in self._with_sizes(needed)]
        self._buffers.clear()  # the old ones first: both at once might not fit
        try:
            self._buffers.extend(np.zeros(n, _numpy_type(k)) for n, k in zip(room, self._kinds, strict=True))
        except MemoryError:
            self._buffers.clear()  # none rather than some: the next step, a smaller one, begins anew
            raise
        return True

    def view(self, name: str, tokens: int, rows: int) -> npt.NDArray[Any]:
        """The value's memory, in its shape for this step."""
        place = self.places[name]
        shape = place.sized(tokens, rows)
        return self._buffers[place.buffer][: prod(shape)].reshape(shape)

    @property
    def nbytes(self) -> int:
        return sum(b.nbytes for b in self._buffers)

    def _needed(self, tokens: int, rows: int) -> list[int]:
        return [_elements(kind, tokens, rows) for kind in self._kinds]

    def _with_sizes(self, needed: list[int]) -> Iterable[tuple[npt.NDArray[Any], int]]:
        buffers = self._buffers or [np.empty(0, np.uint8)] * len(needed)
        return zip(buffers, needed, strict=True)

    def _assign(self, values: dict[str, Value], program: list[tuple[list[str], list[str]]]) -> dict[str, Place]:
        last_read: dict[str, int] = {}
        for index, (reads, writes) in enumerate(program):
            last_read.update(dict.fromkeys([*writes, *reads], index))
        free: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
        places: dict[str, Place] = {}
        for index, (reads, writes) in enumerate(program):
            for name in writes:
                value = values[name]
                kind = _kind(value)
                if not free[kind]:
                    self._kinds.append(value)
                    free[kind].append(len(self._kinds) - 1)
                places[name] = Place(free[kind].pop(), _numpy_type(value), value.shape)
            for name in {*reads, *writes}:
                if last_read[name] == index and name in places:
                    free[_kind(values[name])].append(places[name].buffer)
        return places


def program(manifest: Manifest) -> Iterable[tuple[list[str], list[str]]]:
    """(what is read, what is written) of each step: the step's inputs, segment, attention, segment …"""
    yield [], _given(manifest)
    for index, segment in enumerate(manifest.segments):
        yield [v.name for v in segment.inputs], [v.name for v in segment.outputs]
        if index < len(manifest.attention):
            spec = manifest.attention[index]
            yield [spec.q, spec.k, spec.v], [spec.output]


def _given(manifest: Manifest) -> list[str]:
    """Inputs that no segment and no attention makes: ids, positions, rows."""
    made = {v.name for s in manifest.segments for v in s.outputs} | {a.output for a in manifest.attention}
    return list(dict.fromkeys(v.name for s in manifest.segments for v in s.inputs if v.name not in made))


def _kind(value: Value) -> tuple[Any, ...]:
    """Values of one kind take equally many bytes in every step."""
    fixed = prod(axis for axis in value.shape if isinstance(axis, int))
    return value.dtype, fixed, tuple(sorted(axis for axis in value.shape if isinstance(axis, str)))


def _elements(value: Value, tokens: int, rows: int) -> int:
    return prod({"T": tokens, "R": rows}[axis] if isinstance(axis, str) else axis for axis in value.shape)


def _numpy_type(value: Value) -> type[np.generic]:
    if value.dtype not in _DTYPES:
        raise PackError(f"value {value.name} has type {value.dtype}, which cannot be bound on the CPU")
    return _DTYPES[value.dtype]
