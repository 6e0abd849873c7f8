"""Entries in other libraries' registries, for a while."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


@contextmanager
def registered(registry: MutableMapping[str, Any], name: str, entry: Any) -> Iterator[None]:
    """`registry[name]` is `entry` while inside, and what it was before, or absent, afterwards."""
    before = registry.get(name, _ABSENT)
    registry[name] = entry
    try:
        yield
    finally:
        if before is _ABSENT:
            del registry[name]
        else:
            registry[name] = before
