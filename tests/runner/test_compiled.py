"""Kernels are compiled once a machine, not once a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest

from packhorse.runner.compiled import compiled

ATTEND_ONCE = """
import numpy as np
from tests.runner.ragged import Attention, make_spec, random_qkv, step
spec = make_spec(2, 1, 16)
attention = Attention(spec, 2)
batch = step(np.array([[0, 1]], np.int32), [5], [1], 16)
attention.run(batch, *random_qkv(spec, 1, np.random.default_rng(0)))
print(sum(attention.call.kernels[0].stats.cache_hits.values()))
"""


def test_a_second_process_finds_the_kernels_of_the_first(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(root)}
    hits = [
        subprocess.run(
            [sys.executable, "-c", ATTEND_ONCE], cwd=root, env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()
        for _ in range(2)
    ]
    assert hits == ["0", "1"]


def test_without_a_writable_place_kernels_are_kept_under_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = []

    def njit(function: object, *, cache: bool = False, nogil: bool) -> object:  # noqa: ARG001
        if cache and not numba.config.CACHE_DIR:
            raise RuntimeError("cannot cache function: no locator available")
        places.append(numba.config.CACHE_DIR if cache else None)
        return function

    monkeypatch.setattr(numba, "njit", njit)
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setenv("PACKHORSE_HOME", str(tmp_path))
    compiled(len)
    monkeypatch.delenv("PACKHORSE_HOME")
    compiled(len)
    assert places == [str(tmp_path / "kernels"), None]
    assert numba.config.CACHE_DIR == "", "other users of numba keep their own setting"
