"""Compiling with numba: one decorator for all kernels, and where their machine code is kept between runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile `function` at its first call, and keep the machine code on disk for the next process.

    The kernel runs without the interpreter lock, on the calling thread only: work is shared out by `Crew`.

    numba looks for a writable place by itself: NUMBA_CACHE_DIR, the folder of the source file, the user's cache
    directory. Containers often have none of them; then it is a folder under PACKHORSE_HOME, and with no such folder
    the kernel is compiled anew in each process.
    """
    try:
        return cast(F, numba.njit(function, cache=True, nogil=True))
    except RuntimeError:  # "no locator available"
        return _compiled_under_home(function)


def _compiled_under_home(function: F) -> F:
    home = os.environ.get("PACKHORSE_HOME")
    if not home:
        return cast(F, numba.njit(function, nogil=True))
    # numba reads the setting when the decorator runs and never again, so other users of numba in this process keep
    # their own.
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(Path(home) / "kernels")
    try:
        return cast(F, numba.njit(function, cache=True, nogil=True))
    except RuntimeError:
        return cast(F, numba.njit(function, nogil=True))
    finally:
        numba.config.CACHE_DIR = before
